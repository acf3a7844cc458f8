"""The sh text of the job mechanism: what runs on the target. Pure; `jobs` sends it.

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

MARKED = r"""marked() {
  # Running processes that are provably of a job of $2 below the root $1: "PID ID" lines. Their
  # environment names it, or they hold its log open for writing, as only what the job started does:
  # a title that was written over the environment hides the first. Processes of another PID
  # namespace have marks and paths of their own.
  # $3, words: inodes of sockets. Who holds one is listed too, as "PID - JOB" (its mark, or -).
  {
    # A newline in a name would begin a line of its own: busybox's ls shows none, GNU's quotes them.
    QUOTING_STYLE=c-maybe ls -ld /proc/self/ns/pid /proc/[0-9]*/ns/pid 2>/dev/null
    if printf 'a\0b=1\0' | grep -qzxF 'b=1' 2>/dev/null; then
      grep -szHE '^DEPLOYER_JOBS?=' /proc/[0-9]*/environ | tr '\0\n' '\n '
    else
      for mk_file in /proc/[0-9]*/environ; do
        tr '\0\n' '\n ' <"$mk_file" 2>/dev/null | sed -n "s,^DEPLOYER_JOBS\{0,1\}=,$mk_file:&,p"
      done
    fi
    QUOTING_STYLE=c-maybe ls -l /proc/[0-9]*/fd 2>/dev/null
  } | awk -v root="$1" -v name="$2" -v inodes="${3:-}" '
    BEGIN {
      n = split(inodes, a, " ")
      for (i = 1; i <= n; i++) if (a[i] != "") socket["socket:[" a[i] "]"] = 1
      base = root "/" name "/"
    }
    / \/proc\/[0-9a-z]+\/ns\/pid -> / {
      at = index($0, "/proc/")
      split(substr($0, at), p, "/")
      place[p[3]] = $NF
      next
    }
    /^\/proc\/[0-9]+\/environ:DEPLOYER_JOBS?=/ {
      split($0, p, "/")
      at = index($0, "=")
      value = substr($0, at + 1)
      if (substr($0, at - 1, 1) == "S") { if (value == root) rooted[p[3]] = 1 }
      else if (!(p[3] in job)) job[p[3]] = value
      next
    }
    /^\/proc\/[0-9]+\/fd:$/ { split($0, p, "/"); pid = p[3]; next }
    ($NF in socket) && !(pid in owner) { owner[pid] = 1; owners[++count] = pid }
    substr($0, 3, 1) == "w" && (at = index($0, " -> ")) && index(substr($0, at + 4), base) == 1 {
      path = substr($0, at + 4 + length(base))
      sub(/ \(deleted\)$/, "", path)
      if (path ~ /^[^\/]+\/log$/) { sub(/\/log$/, "", path); found[pid " " path] = pid }
    }
    END {
      for (pid in rooted) if (index(job[pid], name "/") == 1)
        found[pid " " substr(job[pid], length(name) + 2)] = pid
      for (row in found) if (place[found[row]] == place["self"]) print row
      for (i = 1; i <= count; i++) {
        pid = owners[i]
        print pid, "-", (job[pid] == "" ? "-" : job[pid])
      }
    }'
}
"""

_REPORT = r"""report() {
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
    + _REPORT
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
    + _REPORT
    + r"""id=$3
job=$1/$2/$id
value leader; leader=$val
pid=$4 start=$5 boot=$6 session=$7
report "$8" "$9" "${10}"
"""
)

# Runs as the session leader; $1 folder, $2 most log bytes, $3 rotated logs kept, $4 seconds between
# looks at the log's size. It stays until the script ends, to write how.
WRAPPER = (
    STAT
    + r"""job=$1
cd "$job" || exit 70
umask 022
exec >>"$job/log" 2>&1
trap : HUP INT QUIT TERM
stat_of "$$" || exit 71
cat /proc/self/cgroup >cgroup 2>/dev/null
cat /proc/sys/kernel/random/boot_id >boot
printf '%s\n' "$$" >session
leader=$st_start
printf '%s\n' "$leader" >leader
rotate() {
  : >rotating
  number=$1
  while [ "$number" -gt 1 ]; do
    [ ! -e "log.$((number - 1))" ] || mv -f "log.$((number - 1))" "log.$number"
    number=$((number - 1))
  done
  if cp log log.new && mv -f log.new log.1; then
    value log.base
    taken=$(wc -c <log.1)
    printf '%s\n' $((${val:-0} + taken)) >log.base.new && mv -f log.base.new log.base && : >log
  else
    # No room for the copy: older logs go, so that the next look can make it.
    rm -f log.new log.[1-9] log.[1-9][0-9]
  fi
  rm -f rotating
}
(
  trap 'kill "$nap" 2>/dev/null; exit 0' HUP INT QUIT TERM
  nap=
  rm -f rotating
  while sleep "$4" & nap=$!; wait "$nap"; do
    # The script may not have recorded itself yet; and it may outlive the wrapper.
    value pid; pid=$val
    value start; start=$val
    is_process "$$" "$leader" || is_process "${pid:-0}" "$start" || exit 0
    size=$(wc -c <log) || continue
    [ "$size" -le "$2" ] || rotate "$3"
  done
) 3>&- 9>&- &
monitor=$!
sh "$job/enter"
code=$?
kill "$monitor" 2>/dev/null
ended="code $code"
[ "$code" -le 128 ] || [ "$code" -gt 192 ] || ended="signal $((code - 128))"
printf '%s\n' "$ended" >exit.new && mv -f exit.new exit
"""
)

# Becomes the script. It records itself, publishes the job, and only then gives the lock back.
ENTER = (
    STAT
    + r"""job=$JOB
stat_of "$$" || exit 71
printf '%s\n' "$$" >pid
printf '%s\n' "$st_start" >start
id=${job##*/}
ln -s "$id" "../.current.$$" && { mv -T "../.current.$$" ../current 2>/dev/null ||
  { rm -f "../.current.$$"; ln -sfn "$id" ../current; }; } || exit 72
if [ -f secrets ]; then
  set -a
  . ./secrets
  set +a
  rm -f secrets
fi
if [ -d ../.lock.d ]; then rm -rf ../.lock.d; else flock -u 9; fi
printf '%s %s\n' "$$" "$st_start" >&3
unset id st_line st_pid st_state st_session st_start
exec sh "$job/script" 3>&- 9>&-
"""
)

# $1 root, $2 name, $3 id, $4 most log bytes, $5 rotated logs kept, $6 seconds between looks;
# stdin: a tar of the job's files.
START = (
    STAT
    + _REPORT
    + r"""umask 077
fail() { printf '%s\n' "$1" >&2; exit "${2:-73}"; }
place=$1/$2
mkdir -p "$place" || fail "cannot make $place"
command -v setsid >/dev/null || fail 'there is no setsid on this machine (package util-linux)'
locked=
if command -v flock >/dev/null; then
  exec 9>"$place/.lock" || fail "cannot open $place/.lock"
  tries=0
  until flock -n 9; do
    tries=$((tries + 1))
    [ "$tries" -lt 400 ] || fail "another start of $2 holds $place/.lock since 20 s" 75
    sleep 0.05 2>/dev/null || sleep 1
  done
else
  tries=0
  until mkdir "$place/.lock.d" 2>/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -lt 400 ] || fail "another start of $2 holds $place/.lock.d since 20 s" 75
    sleep 0.05 2>/dev/null || sleep 1
  done
  locked=$place/.lock.d
  trap '[ -z "$locked" ] || rmdir "$locked" 2>/dev/null' EXIT
fi
if id=$(readlink "$place/current"); then
  job=$place/$id
  identity
  report tail 0 0 >"$place/.report" || fail "cannot write below $place"
  if [ "$alive" = yes ]; then
    cat >/dev/null
    printf 'attached\n'
    cat "$place/.report"
    exit 0
  fi
fi
id=$3
job=$place/$id
[ ! -e "$job" ] || fail "job $2/$id exists already" 74
rm -rf "$place/.new"
mkdir "$place/.new" && tar -xf - -C "$place/.new" && mv "$place/.new" "$job" ||
  { rm -rf "$place/.new"; fail "cannot write the files of job $2/$id"; }
most=$4 keep=$5 every=$6
JOB=$job DEPLOYER_JOB=$2/$id DEPLOYER_JOBS=$1
export JOB DEPLOYER_JOB DEPLOYER_JOBS
ready=$( {
  set -- sh "$job/wrapper" "$job" "$most" "$keep" "$every"
  if setsid -f true; then
    setsid -f "$@" 2>>"$job/log"
  else
    # busybox has no -f: there the job starts with SIGINT and SIGQUIT ignored.
    setsid "$@" 2>>"$job/log" &
  fi
} 3>&1 >/dev/null 2>&1 </dev/null | head -n 1)
locked=
rm -f "$job/secrets"
if [ -z "$ready" ]; then
  printf 'job %s did not start\n' "$2/$id" >&2
  tail -n 20 "$job/log" >&2
  exit 76
fi
identity
[ "$pid $start" = "$ready" ] || fail "job $2/$id wrote $pid $start but said $ready"
printf 'started\n'
report tail 0 0
"""
)

# $1 root, $2 name, $3 id, $4 pid, $5 start, $6 boot, $7 session, $8 none|main|TERM|KILL|KILLALL.
# Lists what is left of a job, and signals it: `main` TERMs the script's own process only, TERM all
# but the wrapper, which writes the end; KILL likewise; KILLALL the wrapper too.
SURVEY = (
    STAT
    + MARKED
    + r"""job=$1/$2/$3
main=$4 main_start=$5 boot=$6 session=$7 action=$8
read -r boot_now </proc/sys/kernel/random/boot_id
if [ "$boot" != "$boot_now" ]; then printf 'end\n'; exit 0; fi
value leader; leader=$val
marked=
for found in $(marked "$1" "$2" | awk -v id="$3" '$2 == id { print $1 }'); do
  marked="$marked $found"
done
holder=gone
if stat_of "$session"; then
  if [ "$st_start" = "$leader" ]; then holder=ours; else holder=other; fi
fi
[ "$holder" != gone ] || ! is_process "$main" "$main_start" || holder=ours
cgroup=
[ "$holder" != gone ] || cgroup=$(cat "$job/cgroup" 2>/dev/null)
member() {
  # Is the process just read by stat_of of this job? Sets role.
  role=
  if [ "$1" = "$main" ] && [ "$st_start" = "$main_start" ]; then role=main; return 0; fi
  if [ "$1" = "$session" ] && [ "$st_start" = "$leader" ]; then role=wrapper; return 0; fi
  case " $marked " in
    *" $1 "*) role=marked; return 0 ;;
  esac
  [ "$st_session" = "$session" ] || return 1
  [ "$st_start" -ge "${leader:-$main_start}" ] || return 1
  case $holder in
    ours) role=session; return 0 ;;
    gone) # The number may belong to a later session: the control group decides.
      [ -n "$cgroup" ] && [ "$(cat "/proc/$1/cgroup" 2>/dev/null)" = "$cgroup" ] || return 1
      role=session; return 0 ;;
  esac
  return 1
}
for found in /proc/[0-9]*; do
  pid=${found#/proc/}
  stat_of "$pid" || continue
  case $st_state in Z|X|x) continue ;; esac
  member "$pid" || continue
  case $action-$role in
    main-main) kill -TERM "$pid" 2>/dev/null ;;
    TERM-wrapper|KILL-wrapper) ;;
    TERM-*) kill -TERM "$pid" 2>/dev/null ;;
    KILL-*|KILLALL-*) kill -KILL "$pid" 2>/dev/null ;;
  esac
  comm=
  { read -r comm <"/proc/$pid/comm"; } 2>/dev/null || :
  printf 'member %s %s %s %s\n' "$pid" "$st_state" "$role" "$comm"
done
printf 'end\n'
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
