"""The sh text of the job mechanism: how a job is found, read and removed. Pure; `jobs` sends it.

job_start starts one, job_marks tells whose a process is.

All take their values as "$1".., so the text is constant. Sizes in bytes, times in seconds, start
times in clock ticks since boot.
"""

from __future__ import annotations

LOG_CHUNK = 1024 * 1024
"""Most log bytes of one poll."""

STAT = r"""stat_of() {
  # Fields of /proc/PID/stat after the command name, which may hold spaces, ')' and newlines.
  st_line=
  { read -r st_line <"/proc/$1/stat"; } 2>/dev/null
  st_pid=$1
  set -- ${st_line##*) }
  if [ "$#" -lt 20 ]; then
    [ -n "$st_line" ] || return 1
    st_line=$(cat "/proc/$st_pid/stat" 2>/dev/null) || return 1
    set -- ${st_line##*) }
    [ "$#" -ge 20 ] || return 1
  fi
  st_state=$1 st_session=$4 st_start=${20}
}
is_process() {
  # Is process $1, started at $2, running?
  stat_of "$1" && [ "$st_start" = "$2" ] && case $st_state in Z|X|x) false ;; esac
}
value() {
  # The one-line file $1 of the job, '' when there is none.
  val=
  { read -r val <"$job/$1"; } 2>/dev/null || :
}
"""

REPORT = r"""report() {
  # $1 inode and $2 offset to read the log from ('tail' N: its last N bytes), $3 most bytes.
  # Offsets count all bytes ever logged: log.base is what rotation has taken away.
  value exit; ended=$val
  alive=no
  read -r boot_now </proc/sys/kernel/random/boot_id
  if [ "$boot" = "$boot_now" ] && [ -n "$pid" ]; then
    if is_process "$pid" "$start"; then
      alive=yes
    elif [ -z "$ended" ] && is_process "$session" "$leader"; then
      alive=yes
    fi
  fi
  value exit; ended=$val
  tries=0
  while [ -e "$job/rotating" ] && [ "$tries" -lt 20 ]; do
    sleep 0.05 2>/dev/null || sleep 1
    tries=$((tries + 1))
  done
  value log.base; from=${val:-0}; base=$from
  found=$(stat -L -c '%i %s' "$job/log" 2>/dev/null) || found='0 0'
  size=${found#* }
  if [ "$1" = tail ]; then
    [ "$size" -le "$2" ] || from=$((base + size - $2))
  elif [ "$1" = 0 ] || [ "$1" = "${found% *}" ]; then
    [ "$2" -gt $((base + size)) ] || from=$2
  fi
  old=0
  if [ "$from" -lt "$base" ]; then
    old=$(stat -L -c %s "$job/log.1" 2>/dev/null) || old=0
    [ "$from" -ge $((base - old)) ] || from=$((base - old))
    old=$((base - from))
  fi
  figures=
  [ ! -s "$job/progress" ] || figures=$(tail -n 1 "$job/progress" | head -c 4096)
  printf '%s\n' "id $id" "pid $pid" "start $start" "boot $boot" "session $session" \
    "alive $alive" "exit $ended" "inode ${found% *}" "from $from" "progress $figures" ''
  if [ "$from" -lt $((base + size)) ]; then
    {
      [ "$old" -eq 0 ] || tail -c "$old" "$job/log.1"
      if [ "$from" -gt "$base" ]; then
        tail -c "+$((from - base + 1))" "$job/log"
      else
        cat "$job/log"
      fi
    } 2>/dev/null | head -c "$3"
  fi
}
identity() {
  value pid; pid=$val
  value start; start=$val
  value boot; boot=$val
  value session; session=$val
  value leader; leader=$val
}
"""

# $1 root, $2 name, $3 bytes of the log's end, $4 the id ('' or left out: the current one)
FIND = (
    STAT
    + REPORT
    + r"""id=${4:-}
[ -n "$id" ] || id=$(readlink "$1/$2/current") || { printf 'none\n'; exit 0; }
job=$1/$2/$id
[ -d "$job" ] || { printf 'none\n'; exit 0; }
[ -f "$job/pid" ] || { printf 'none\n'; exit 0; }
identity
report tail "$3" "$3"
"""
)

# $1 root, $2 name, $3 id, $4 pid, $5 start, $6 boot, $7 session, $8 inode, $9 offset, ${10} most
POLL = (
    STAT
    + REPORT
    + r"""id=$3
job=$1/$2/$id
value leader; leader=$val
pid=$4 start=$5 boot=$6 session=$7
report "$8" "$9" "${10}"
"""
)

# $1 root, $2 name, $3 how many of the newest to keep. Never the current one or one that is alive.
PRUNE = (
    STAT
    + r"""cd "$1/$2" 2>/dev/null || exit 0
current=$(readlink current) || current=
read -r boot_now </proc/sys/kernel/random/boot_id
kept=0
ls -1t | while read -r id; do
  [ -d "$id" ] && [ ! -L "$id" ] || continue
  kept=$((kept + 1))
  [ "$kept" -gt "$3" ] && [ "$id" != "$current" ] || continue
  job=$1/$2/$id
  value boot
  if [ "$val" = "$boot_now" ]; then
    value pid; pid=$val
    value start
    ! is_process "$pid" "$val" || continue
  fi
  rm -rf "./$id" && printf '%s\n' "$id"
done
"""
)
