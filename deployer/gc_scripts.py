"""What `gc` runs on the target: one look, and one removal a folder. POSIX sh."""

from __future__ import annotations

from collections.abc import Sequence

from deployer.gc import Found, GcFact, Kind
from deployer.model import Probe, ProbeOutput, Where
from deployer.remote.job_scripts import STAT
from deployer.remote.jobs import ROOT
from deployer.shell import assignments, words

TRASH = ".deployer-trash"
"""Beside what is removed; only what lies in one that holds MARK is believed to be ours."""
MARK = "of-deployer"

USED = r"""used() {
  # Paths below the folders "$@" that some process holds: open files, program, working directory,
  # mappings, and words of its command line. grep goes first: there may be thousands of them.
  us_list=$(printf '%s\n' "$@")
  {
    ls -l /proc/[0-9]*/fd /proc/[0-9]*/exe /proc/[0-9]*/cwd 2>/dev/null | grep -F -e "$us_list" |
      sed -n 's/^.* -> //p'
    grep -hF -e "$us_list" /proc/[0-9]*/maps 2>/dev/null | sed -n 's/^[^/]* \(\/.*\)$/\1/p'
    # No grep: busybox's reads a command line up to its first NUL.
    cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n'
  } | sed 's/ (deleted)$//' | sort -u | while IFS= read -r us_path; do
    for us_folder in "$@"; do
      case $us_path in
        "$us_folder"|"$us_folder"/*) printf '%s\n' "$us_path"; break ;;
      esac
    done
  done
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

OURS = r"""ours() {
  # Does the folder $2 hold what only this tool writes, for its kind $1?
  case $1 in
    venv) [ -f "$2/deployer.json" ] || [ -f "$2/complete" ] || [ -f "$2/deployer.build" ] ;;
    weights) [ -f "$2/.deployer/verified.json" ] ;;
    launch|job) [ -f "$2/wrapper" ] && [ -f "$2/script" ] ;;
    trash) [ -f "${2%/*}/of-deployer" ] ;;
    *) false ;;
  esac
}
"""

# $builds, $links, $models, $jobs: lines.
LOOK = (
    USED
    + ALIVE
    + OURS
    + r"""
size() { du -sk "$1" 2>/dev/null | { read -r sz_kb sz_rest; printf '%s' "${sz_kb:-0}"; }; }
tab=$(printf '\t')
put() {
  # $1 kind, $2 folder, $3 files that are not ours, $4 job, $5 alive, $6 current
  case $2 in *"$tab"*|*'
'*) return ;; esac
  at=$(stat -c %Y "$2" 2>/dev/null) || return
  mine=no; ! ours "$1" "$2" || mine=yes
  printf 'found\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' \
    "$1" "$2" "$(size "$2")" "$at" "$mine" "$3" "$4" "$5" "$6"
}
foreign() {
  # How many files of the model's folder $1 are not in its hash record.
  (cd "$1" && find . -name .deployer -prune -o ! -type d -print | sed 's/^\.\///' |
    while IFS= read -r fo_name; do
      fo_own=$fo_name
      for fo_end in .part.map .part .bad; do fo_own=${fo_own%"$fo_end"}; done
      grep -qF "\"$fo_own\":" .deployer/verified.json 2>/dev/null || printf 'x\n'
    done | wc -l | tr -d ' ')
}
trash() {
  [ -f "$1/$TRASH/$MARK" ] || return 0
  for tr_path in "$1/$TRASH"/* "$1/$TRASH"/.[!.]*; do
    if [ "${tr_path##*/}" != "$MARK" ] && { [ -e "$tr_path" ] || [ -L "$tr_path" ]; }; then
      put trash "$tr_path" 0 '' no no
    fi
  done
}
each() { printf '%s\n' "$1" | while IFS= read -r ea_line; do
  [ -z "$ea_line" ] || "$2" "$ea_line"; done; }
free() {
  fr_kb=$(df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print $4 }')
  [ -z "$fr_kb" ] || printf 'free\t%s\t%s\n' "$1" "$fr_kb"
}
builds_of() {
  [ -d "$1" ] || return 0
  free "$1"; trash "$1"
  for bu_path in "$1"/*; do
    [ ! -d "$bu_path" ] || [ -L "$bu_path" ] || put venv "$bu_path" 0 '' no no
  done
}
link_of() {
  [ ! -L "$1" ] || printf 'link\t%s\t%s\n' "$1" "$(readlink -f "$1")"
}
model_of() {
  trash "${1%/*}"
  [ -d "$1" ] && [ ! -L "$1" ] || return 0
  free "$1"
  put weights "$1" "$(foreign "$1")" '' no no
  grep -lF -e "$1" "$root"/server-*/*/script 2>/dev/null | while IFS= read -r mo_script; do
    mo_job=${mo_script#"$root"/}
    printf 'named\t%s\t%s\n' "$1" "${mo_job%%/*}"
  done | sort -u
}
job_of() {
  [ -d "$root/$1" ] || return 0
  trash "$root/$1"
  jo_kind=job; case $1 in server-*) jo_kind=launch ;; esac
  jo_current=$(readlink "$root/$1/current"); jo_current=${jo_current##*/}
  for jo_path in "$root/$1"/*; do
    [ -d "$jo_path" ] && [ ! -L "$jo_path" ] || continue
    jo_alive=no; ! alive "$jo_path" || jo_alive=yes
    jo_now=no; [ "${jo_path##*/}" != "$jo_current" ] || jo_now=yes
    put "$jo_kind" "$jo_path" 0 "$1" "$jo_alive" "$jo_now"
  done
}
each "$builds" builds_of
each "$links" link_of
each "$models" model_of
each "$jobs" job_of
printf '%s\n%s\n%s\n' "$builds" "$models" "$jobs_at" | {
  set --
  while IFS= read -r line; do [ -z "$line" ] || set -- "$@" "$line"; done
  used "$@"
} | sed "s/^/used$tab/"
printf 'end\n'
"""
)

# $1 kind, $2 folder, $3 the root of jobs; $4.. links. Exit 0 with `removed`, `gone` or `held WHY`.
REMOVE = (
    USED
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
if [ "$kind" = trash ]; then
  rm -rf "$path" || exit 1
  trash=${path%/*}
  [ "$(ls -A "$trash")" != of-deployer ] || { rm -f "$trash/of-deployer"; rmdir "$trash"; }
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
mkdir -p "$trash" && : >"$trash/of-deployer" || exit 1
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


def look_probe(
    builds: Sequence[str],
    links: Sequence[str],
    models: Sequence[str],
    jobs: Sequence[str],
    where: Where,
    root: str = ROOT,
) -> Probe:
    """The look; its fact is GcFact."""
    values = {
        "root": root,
        "builds": "\n".join(builds),
        "links": "\n".join(links),
        "models": "\n".join(models),
        "jobs": "\n".join(jobs),
        "jobs_at": "\n".join(f"{root}/{job}" for job in jobs),
        "TRASH": TRASH,
        "MARK": MARK,
    }
    return Probe("gc", where, assignments(values) + LOOK, parse_look, timeout_s=120.0)


def parse_look(output: ProbeOutput) -> GcFact:
    """Any output gives a fact; one that is cut off is a `problem`."""
    if output.timed_out:
        return GcFact(problem="looking at the folders timed out (a hung mount?)")
    lines = output.text.split("\n")
    if "end" not in lines[-2:]:
        told = output.error_text.strip().split("\n")[-1][:200] or f"exit {output.exit}"
        return GcFact(problem=f"the folders could not be looked at: {told}")
    found, used = [], []
    links: dict[str, str] = {}
    free: dict[str, int] = {}
    named: dict[str, tuple[str, ...]] = {}
    for line in lines:
        match line.split("\t"):
            case ["found", kind, path, kb, at, mine, foreign, job, alive, current]:
                found.append(
                    Found(
                        _kind(kind),
                        path,
                        int(kb) * 1024,
                        int(at),
                        mine == "yes",
                        int(foreign),
                        job,
                        alive == "yes",
                        current == "yes",
                    )
                )
            case ["link", link, target]:
                links[link] = target
            case ["free", path, kb]:
                free[path] = int(kb) * 1024
            case ["named", path, job]:
                named[path] = (*named.get(path, ()), job)
            case ["used", path]:
                used.append(path)
    return GcFact("", tuple(found), links, tuple(used), named, free)


def _kind(word: str) -> Kind:
    kinds: dict[str, Kind] = {
        **{"venv": "venv", "weights": "weights", "launch": "launch"},
        **{"job": "job", "trash": "trash"},
    }
    return kinds[word]


def removal(found: Found, links: Sequence[str]) -> str:
    """The script that removes one folder, as text with its values: what a dry-run shows."""
    return f"set -- {words([found.kind, found.path, *links])}\n{REMOVE}"
