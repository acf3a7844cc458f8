"""What `gc` runs on the target to remove one folder, and what its look shares with it. POSIX sh."""

from __future__ import annotations

from collections.abc import Sequence

from deployer.gc_found import Found
from deployer.remote.job_scripts import STAT
from deployer.shell import words

TRASH = ".deployer-trash"
"""Beside what is removed; only what lies in one that holds MARK is believed to be ours."""
MARK = "of-deployer"

USED = r"""DEPLOYER_GC=1
export DEPLOYER_GC
be_tab=$(printf '\t')
of_gc() {
  # Is the process $1 a tool of a look like this one? These hold what they look at.
  { tr '\0' '\n' <"/proc/$1/environ"; } 2>/dev/null | grep -q '^DEPLOYER_GC='
}
below() {
  # Of lines "PID, tab, PATH or NAME=PATH" those with a path at or below one of $BE_LIST.
  awk '
    BEGIN { n = split(ENVIRON["BE_LIST"], folder, "\n") }
    {
      sub(/ \(deleted\)$/, "")
      at = index($0, "\t")
      path = substr($0, at + 1)
      if (path ~ /^[A-Za-z0-9_-]+=\//) path = substr(path, index(path, "=") + 1)
      for (i = 1; i <= n; i++)
        if (path == folder[i] || index(path, folder[i] "/") == 1) {
          print substr($0, 1, at) path
          next
        }
    }'
}
arguments() {
  # PID, tab, argument, of those at or below $BE_LIST. A newline in one is made a blank: a shell may
  # have a script as its argument. Not by grep: busybox's reads a command line up to its first NUL.
  # Only when there is any is each process asked.
  ar_any=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\000\n' '\n ' | sed "s/^/0$be_tab/" | below)
  [ -n "$ar_any" ] || return 0
  for ar_pid in /proc/[0-9]*; do
    printf '\000=%s\000' "${ar_pid#/proc/}"
    cat "$ar_pid/cmdline" 2>/dev/null
  done | tr '\000\n' '\n ' |
    awk '/^=[0-9]+$/ { pid = substr($0, 2); next } { print pid "\t" $0 }' | below
}
used() {
  # Paths below the folders "$@" (by these or their real names) that some process holds: open files,
  # program, working directory, mappings, and arguments (PATH or NAME=PATH).
  BE_LIST=$(for us_folder do printf '%s\n' "$us_folder"; readlink -f "$us_folder"; done | sort -u)
  [ -n "$BE_LIST" ] || return 0
  export BE_LIST
  {
    ls -l /proc/[0-9]*/fd /proc/[0-9]*/exe /proc/[0-9]*/cwd 2>/dev/null | awk '
      /^\/proc\/[0-9]+\/fd:$/ { split($0, p, "/"); pid = p[3]; next }
      (at = index($0, " -> ")) > 0 {
        one = pid
        if (match($0, /\/proc\/[0-9]+\/[a-z]+ -> /)) {
          split(substr($0, RSTART), p, "/")
          one = p[3]
        }
        print one "\t" substr($0, at + 4)
      }'
    grep -HF -e "$BE_LIST" /proc/[0-9]*/maps 2>/dev/null |
      sed -n "s/^\/proc\/\([0-9]*\)\/maps:[^/]* \(\/.*\)\$/\1$be_tab\2/p"
    arguments
  } | below | sort -u | {
    us_last= us_ours=
    while IFS=$be_tab read -r us_pid us_path; do
      if [ "$us_pid" != "$us_last" ]; then
        us_last=$us_pid us_ours=no
        ! of_gc "$us_pid" || us_ours=yes
      fi
      [ $us_ours = yes ] || printf '%s\n' "$us_path"
    done
  } | sort -u
}
"""

MOUNTED = r"""mounted() {
  # Is a file system mounted at the folder $1, or in it, or it or a part of it at another place?
  # proc(5): mountinfo's fields 3 to 5 are the device, which part of it, and where; blanks and
  # backslashes are octal numbers.
  MO_PATH=$(readlink -f "$1") awk '
    function plain(t) {
      gsub(/\\040/, " ", t); gsub(/\\011/, "\t", t); gsub(/\\134/, "\\", t)
      return t
    }
    function within(t, folder) {
      return t == folder || index(t, (folder == "/" ? "" : folder) "/") == 1
    }
    BEGIN { path = ENVIRON["MO_PATH"]; best = 0 }
    {
      device[NR] = $3; root[NR] = plain($4); at[NR] = plain($5)
      if (within(at[NR], path)) found = 1
      # A later one covers an earlier one.
      if (within(path, at[NR]) && (!best || length(at[NR]) >= length(at[best]))) best = NR
    }
    END {
      if (found || !best) exit !found
      rest = at[best] == "/" ? path : substr(path, length(at[best]) + 1)
      own = (root[best] == "/" ? "" : root[best]) rest
      for (i = 1; i <= NR; i++)
        if (i != best && device[i] == device[best] && within(root[i], own)) exit 0
      exit 1
    }' /proc/self/mountinfo
}
"""

ALIVE = (
    STAT
    + r"""alive() {
  # Does the job in the folder $1 run, or the wrapper that will write how it ended?
  job=$1
  read -r boot_now </proc/sys/kernel/random/boot_id
  value boot
  [ "$val" = "$boot_now" ] || return 1
  value pid; al_pid=$val
  value start
  [ -n "$al_pid" ] && is_process "$al_pid" "$val" && return 0
  value session; al_pid=$val
  value leader
  [ -n "$al_pid" ] && [ -n "$val" ] && is_process "$al_pid" "$val"
}
"""
)

OURS = r"""other_user() {
  # The number of a user other than ours who has a file in $1; '' when there is none.
  find "$1" ! -user "$(id -u)" -exec stat -c %u {} + 2>/dev/null | head -n 1
}
ours() {
  # Does the folder $2 hold what only this tool writes, for its kind $1?
  case $1 in
    venv) [ -f "$2/deployer.json" ] || [ -f "$2/complete" ] || [ -f "$2/deployer.build" ] ;;
    weights) [ -f "$2/.deployer/verified.json" ] ;;
    launch|job) [ -f "$2/wrapper" ] && [ -f "$2/script" ] ;;
    # Its place is ours, and uv marks a cache.
    cache) [ -f "$2/CACHEDIR.TAG" ] ;;
    trash) [ -f "${2%/*}/of-deployer" ] && [ ! -L "${2%/*}" ] ;;
    *) false ;;
  esac
}
"""

# $1 kind, $2 folder, $3.. links. Exit 0 with `removed`, `gone` or `held WHY`.
REMOVE = (
    USED
    + MOUNTED
    + ALIVE
    + OURS
    + r"""
kind=$1 path=$2
shift 2
if [ ! -d "$path" ] || [ -L "$path" ]; then
  if [ "$kind" = trash ] && { [ -e "$path" ] || [ -L "$path" ]; }; then :; else
    printf 'gone\n'; exit 0
  fi
fi
ours "$kind" "$path" || { printf 'held not known to be ours\n'; exit 0; }
! mounted "$path" || { printf 'held something is mounted in it, or it elsewhere\n'; exit 0; }
user=$(other_user "$path")
[ -z "$user" ] || { printf 'held files of user %s are in it\n' "$user"; exit 0; }
if [ "$kind" = trash ]; then
  rm -rf "$path" || exit 1
  trash=${path%/*}
  [ "$(ls -A "$trash" 2>/dev/null)" != of-deployer ] ||
    { rm -f "$trash/of-deployer"; rmdir "$trash" 2>/dev/null; }
  printf 'removed\n'
  exit
fi
for link do
  [ "$(readlink -f "$link")" != "$(readlink -f "$path")" ] ||
    { printf 'held %s points to it\n' "$link"; exit 0; }
done
case $kind in launch|job)
  [ "$(readlink -f "${path%/*}/current")" != "$(readlink -f "$path")" ] ||
    { printf 'held it is the newest\n'; exit 0; }
  ! alive "$path" || { printf 'held its job runs\n'; exit 0; } ;;
esac
[ -z "$(used "$path")" ] || { printf 'held a process uses it\n'; exit 0; }
trash=${path%/*}/.deployer-trash
# Somebody else may have made it, to have us remove what lies where it leads.
[ ! -L "$trash" ] || { printf 'held %s is a symlink\n' "$trash"; exit 0; }
if ! said=$({ mkdir -p "$trash" && : >"$trash/of-deployer"; } 2>&1); then
  rmdir "$trash" 2>/dev/null
  case $said in
    *"No space left"*|*"quota exceeded"*) ;;
    *) printf '%s\n' "$said" >&2; exit 1 ;;
  esac
  # Not even a name can be made. It goes where it is, what makes it count first and what shows that
  # it is ours last.
  rm -f "$path/complete"
  for one in "$path"/* "$path"/.[!.]* "$path"/..?*; do
    case ${one##*/} in deployer.json|deployer.build|.deployer|wrapper|script|CACHEDIR.TAG) ;; *)
      rm -rf "$one" || exit 1 ;;
    esac
  done
  rm -rf "$path" || exit 1
  printf 'removed\n'
  exit
fi
there=$trash/${path##*/}.$$
mv "$path" "$there" || exit 1
# Who opened it in between holds it by its new name.
if [ -n "$(used "$there")" ]; then
  mv "$there" "$path" || exit 1
  printf 'held a process uses it\n'
  exit 0
fi
rm -rf "$there" || exit 1
# The mark goes only when nothing else lies there: what a killed run left needs it.
[ "$(ls -A "$trash")" != of-deployer ] || { rm -f "$trash/of-deployer"; rmdir "$trash"; }
printf 'removed\n'
"""
)


def removal(found: Found, links: Sequence[str]) -> str:
    """The script that removes one folder, as text with its values: what a dry-run shows."""
    return f"set -- {words([found.kind, found.path, *links])}\n{REMOVE}"
