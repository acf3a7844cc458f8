"""The look of `gc` on the target, and on the host below it. POSIX sh, and its parser."""

from __future__ import annotations

from collections.abc import Sequence

from deployer.gc_found import Found, GcFact, HostUsed, Kind, Through
from deployer.gc_scripts import ALIVE, MARK, MOUNTED, OURS, TRASH, USED
from deployer.model import Probe, ProbeOutput, Where
from deployer.remote.jobs import ROOT
from deployer.shell import assignments, words

LOOK_S = 300.0
"""Sizes of trees with many files on a slow disk."""

# $builds, $links, $models, $jobs: lines. $cache: a folder.
LOOK = (
    USED
    + MOUNTED
    + ALIVE
    + OURS
    + r"""
size() { du -sk "$1" 2>/dev/null | { read -r sz_kb sz_rest; printf '%s' "${sz_kb:-0}"; }; }
shared() {
  # KiB of files in $1 that have another name outside of it. stat's %b counts 512 bytes.
  find "$1" -type f -links +1 -exec stat -c '%h %d:%i %b' {} + 2>/dev/null | awk '
    { links[$2] = $1; blocks[$2] = $3; seen[$2]++ }
    END { for (i in seen) if (seen[i] < links[i]) sum += blocks[i]; printf "%d", sum / 2 }'
}
put() {
  # $1 kind, $2 folder, $3 files that are not ours, $4 job, $5 alive, $6 current
  case $2 in *"$be_tab"*|*'
'*) return ;; esac
  at=$(stat -c %Y "$2" 2>/dev/null) || return
  mine=no; ! ours "$1" "$2" || mine=yes
  mount=no; ! mounted "$2" || mount=yes
  printf 'found\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' \
    "$1" "$2" "$(size "$2")" "$at" "$mine" "$3" "$4" "$5" "$6" \
    "$(shared "$2")" "$(readlink -f "$2")" "$mount" "$(other_user "$2")"
}
foreign() {
  # How many files of the model's folder $1 are not in its hash record, which has each on a line of
  # its own. What does not begin with the folder is the rest of a name with a newline.
  find "$1" -name .deployer -prune -o ! -type d -print | while IFS= read -r fo_name; do
    case $fo_name in "$1"/*) ;; *) printf 'x\n'; continue ;; esac
    fo_own=${fo_name#"$1"/}
    for fo_end in .part.map .part .bad; do fo_own=${fo_own%"$fo_end"}; done
    grep -qxF "  \"$fo_own\": {" "$1/.deployer/verified.json" 2>/dev/null || printf 'x\n'
  done | wc -l | tr -d ' '
}
trash() {
  [ -f "$1/$TRASH/$MARK" ] && [ ! -L "$1/$TRASH" ] || return 0
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
  [ -z "$fr_kb" ] || printf 'free\t%s\t%s\t%s\n' "$1" "$fr_kb" "$(stat -c %d "$1")"
}
builds_of() {
  [ -d "$1" ] || return 0
  free "$1"; trash "$1"
  for bu_path in "$1"/*; do
    [ ! -d "$bu_path" ] || [ -L "$bu_path" ] || put venv "$bu_path" 0 '' no no
  done
}
link_of() {
  [ -L "$1" ] || return 0
  printf 'link\t%s\t%s\n' "$1" "$(readlink -f "$1")"
  # A program below the link is that of the system: what shows which build it was started from is
  # what it has mapped since, or nothing.
  li_builds=$(readlink -f "$1.builds")
  BE_LIST=$1
  export BE_LIST
  for li_pid in $(arguments | cut -f 1 | sort -u); do
    ! { cat "/proc/$li_pid/maps"; ls -l "/proc/$li_pid/fd" "/proc/$li_pid/cwd"; } 2>/dev/null |
      grep -qF -e "$1.builds/" -e "$li_builds/" || continue
    [ -d "/proc/$li_pid" ] && ! of_gc "$li_pid" || continue
    li_job=$({ tr '\0' '\n' <"/proc/$li_pid/environ"; } 2>/dev/null |
      sed -n 's/^DEPLOYER_JOB=//p')
    printf 'through\t%s\t%s\t%s\n' "$1" "$li_pid" "$li_job"
  done
}
model_of() {
  trash "${1%/*}"
  [ -d "$1" ] && [ ! -L "$1" ] || return 0
  free "$1"
  put weights "$1" "$(foreign "$1")" '' no no
  grep -lF -e "$1" "$root"/*/*/script "$root"/*/*/manifest.json 2>/dev/null |
    while IFS= read -r mo_script; do
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
real_of() {
  case $1 in *"$be_tab"*) ;; *) printf 'real\t%s\t%s\n' "$1" "$(readlink -f "$1")" ;; esac
}
cache_of() {
  trash "${1%/*}"
  [ -d "$1" ] && [ ! -L "$1" ] || return 0
  free "$1"
  put cache "$1" 0 '' no no
}
each "$builds" builds_of
each "$links" link_of
each "$models" model_of
each "$jobs" job_of
each "$cache" cache_of
each "$names" real_of
for build in "$root"/venv-*/current; do
  ! alive "$build" || { build=${build%/current}; printf 'building\t%s\n' "${build##*/}"; }
done
printf '%s\n%s\n%s\n%s\n' "$builds" "$models" "$jobs_at" "$cache" | {
  set --
  while IFS= read -r line; do [ -z "$line" ] || set -- "$@" "$line"; done
  used "$@"
} | sed "s/^/used$be_tab/"
printf 'end\n'
"""
)

HOST_LOOK = USED + 'used "$@" | sed "s/^/used$be_tab/"\nprintf \'end\\n\'\n'


def look_probe(
    builds: Sequence[str],
    links: Sequence[str],
    models: Sequence[str],
    jobs: Sequence[str],
    where: Where,
    root: str = ROOT,
    cache: str = "",
    names: Sequence[str] = (),
) -> Probe:
    """The look; its fact is GcFact. `names`: paths whose real names are wanted."""
    values = {
        "root": root,
        "builds": "\n".join(builds),
        "links": "\n".join(links),
        "models": "\n".join(models),
        "jobs": "\n".join(jobs),
        "jobs_at": "\n".join(f"{root}/{job}" for job in jobs),
        "cache": cache,
        "names": "\n".join(names),
        "TRASH": TRASH,
        "MARK": MARK,
    }
    return Probe("gc", where, assignments(values) + LOOK, parse_look, timeout_s=LOOK_S)


def host_probe(folders: Sequence[str]) -> Probe:
    """Who holds these, as the host sees it; its fact is HostUsed.

    Containers may share a folder under one path, and a guest does not see another's processes.
    """
    script = f"set -- {words(folders)}\n{HOST_LOOK}"
    return Probe("gc.host", Where.HOST, script, parse_host, timeout_s=60.0)


def parse_host(output: ProbeOutput) -> HostUsed:
    """Any output gives a fact; one that is cut off is a `problem`."""
    lines = output.text.split("\n")
    if output.timed_out or "end" not in lines[-2:]:
        return HostUsed(
            problem=f"the host could not be asked who uses the folders: {_told(output)}"
        )
    return HostUsed(used=tuple(line[5:] for line in lines if line.startswith("used\t")))


def parse_look(output: ProbeOutput) -> GcFact:
    """Any output gives a fact; one that is cut off is a `problem`."""
    if output.timed_out:
        return GcFact(problem="looking at the folders timed out (a hung mount?)")
    lines = output.text.split("\n")
    if "end" not in lines[-2:]:
        return GcFact(problem=f"the folders could not be looked at: {_told(output)}")
    # By path: the trash of a folder with several models is looked at for each.
    found: dict[str, Found] = {}
    used, through, building = [], [], []
    links: dict[str, str] = {}
    free: dict[str, int] = {}
    disks: dict[str, str] = {}
    real: dict[str, str] = {}
    named: dict[str, tuple[str, ...]] = {}
    for line in lines:
        match line.split("\t"):
            case ["found", *row] if len(row) == 13:
                found[row[1]] = _found(row)
            case ["link", link, target]:
                links[link] = target
            case ["free", path, kb, disk]:
                free[path], disks[path] = int(kb) * 1024, disk
            case ["named", path, job]:
                named[path] = (*named.get(path, ()), job)
            case ["used", path]:
                used.append(path)
            case ["through", link, pid, job]:
                through.append(Through(link, int(pid), job))
            case ["real", path, name] if name:
                real[path] = name
            case ["building", job]:
                building.append(job)
    return GcFact(
        *("", tuple(found.values()), links, tuple(used), named, free),
        disks=disks,
        through=tuple(through),
        building=tuple(building),
        real=real,
    )


def _found(row: Sequence[str]) -> Found:
    kind, path, kb, at, mine, foreign, job, alive, current, shared, real, mounted, user = row
    return Found(
        _KINDS[kind],
        path,
        int(kb) * 1024,
        int(at),
        mine == "yes",
        int(foreign),
        job,
        alive == "yes",
        current == "yes",
        int(shared or 0) * 1024,
        real,
        mounted == "yes",
        user,
    )


_KINDS: dict[str, Kind] = {
    **{"venv": "venv", "weights": "weights", "launch": "launch"},
    **{"job": "job", "cache": "cache", "trash": "trash"},
}


def _told(output: ProbeOutput) -> str:
    if output.timed_out:
        return "it timed out"
    return output.error_text.strip().split("\n")[-1][:200] or f"exit {output.exit}"
