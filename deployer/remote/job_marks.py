"""The sh text that tells which processes are of a job, and signals them. Pure.

Values come as "$1".., start times in clock ticks since boot.
"""

from __future__ import annotations

from deployer.remote.job_scripts import STAT

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
