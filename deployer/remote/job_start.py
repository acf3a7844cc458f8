"""The sh text that starts a job: the start, the wrapper round it, what becomes the script. Pure.

Values come as "$1".., sizes in bytes, times in seconds, start times in clock ticks since boot.
"""

from __future__ import annotations

from deployer.remote.job_scripts import REPORT, STAT

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
    + REPORT
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
  trap 'exit 141' PIPE
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
