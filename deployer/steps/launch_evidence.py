"""Asks the machine about a launch that failed: one bounded look at the target, one at its host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployer.deployment import Deployment
from deployer.errors import REFUSALS, StepFailed, Unreachable
from deployer.model import Where
from deployer.remote.jobs import ROOT, JobIdentity
from deployer.remote.transport import Answer
from deployer.sglang.hostfacts import Disk, Holder, HostFacts
from deployer.steps.base import StepContext
from deployer.steps.stop_gpu import pci_address

OOM_FILE = "oom-kills"
"""File of the job's folder: the kills for memory that were counted before the launch."""
TARGET_S = 20.0
HOST_S = 45.0

EVENTS = r"""
put() { printf '%s=%s\n' "$1" "$2"; }
oom_kills() {
  # Of the outermost control group that can be seen: its count holds all groups below.
  oom_dir=/sys/fs/cgroup
  oom_rest=$(sed -n 's/^0:://p' /proc/self/cgroup 2>/dev/null)
  while :; do
    if [ -r "$oom_dir/memory.events" ]; then
      sed -n 's/^oom_kill //p' "$oom_dir/memory.events"
      return
    fi
    oom_rest=${oom_rest#/}
    [ -n "$oom_rest" ] || break
    oom_dir=$oom_dir/${oom_rest%%/*}
    case $oom_rest in */*) oom_rest=${oom_rest#*/} ;; *) oom_rest= ;; esac
  done
  sed -n 's/^oom_kill //p' /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null
}
"""

BASELINE = EVENTS + "oom_kills\n"
"""What is counted before a launch."""

# $1 the job's folder, $2 its session, $3 the model's folder
TARGET = (
    EVENTS
    + r"""
job=$1 session=$2 model=$3
limit=
if command -v timeout >/dev/null 2>&1; then limit='timeout 5'; fi
put oom_kills "$(oom_kills)"
before=
{ IFS= read -r before <"$job/oom-kills"; } 2>/dev/null
put oom_before "$before"
put shm "$($limit df -Pk /dev/shm 2>/dev/null | awk 'END { print $2, $4 }')"
for folder in "${TMPDIR:-/tmp}" "${HOME:-/root}" "${HOME:-/root}/.cache" "$job" "$model"; do
  [ -d "$folder" ] || continue
  put disk "$($limit df -Pk "$folder" 2>/dev/null | awk 'END { print $4 }') $(
    $limit df -Pi "$folder" 2>/dev/null | awk 'END { print $4 }') $folder"
done
put memory_free "$(sed -n 's/^MemAvailable: *\([0-9]*\) kB$/\1/p' /proc/meminfo)"
put nofile "$(ulimit -n)"
for found in /proc/[0-9]*; do
  line=
  { IFS= read -r line <"$found/stat"; } 2>/dev/null
  [ -n "$line" ] || continue
  set -- ${line##*) }
  [ "$4" = "$session" ] || continue
  # A zombie waits for its parent; it holds nothing and tells nothing.
  case $1 in Z|X|x) continue ;; esac
  put member "${found#/proc/} $1 $(tr '\0\n' '  ' <"$found/cmdline" 2>/dev/null | cut -c1-120)"
done
put end yes
"""
)

# $1 when the launch began, in clock ticks since boot
HOST = r"""
put() { printf '%s=%s\n' "$1" "$2"; }
limit=
if command -v timeout >/dev/null 2>&1; then limit='timeout 10'; fi
ticks=$(getconf CLK_TCK 2>/dev/null) || ticks=100
put ticks "$ticks"
telling='NVRM|oom-kill|[Oo]ut of memory|Killed process|nvidia.*(fail|error)|segfault|I/O error'
if lines=$($limit dmesg 2>&1); then :; else
  why=$lines
  if lines=$($limit journalctl -k -b -o short-monotonic --no-pager -n 4000 2>&1); then :; else
    put kernel_problem "$(printf '%s\n' "$why" | tail -n 1)"
    lines=
  fi
fi
printf '%s\n' "$lines" | grep -E "$telling" | tail -n 60 | sed 's/^/kernel=/'
$limit nvidia-smi --query-gpu=pci.bus_id,memory.total,memory.used \
  --format=csv,noheader,nounits 2>/dev/null | sed 's/^/gpu=/'
$limit nvidia-smi --query-compute-apps=gpu_bus_id,pid,used_memory,process_name \
  --format=csv,noheader,nounits 2>/dev/null |
while IFS= read -r row; do
  pid=${row#*,}
  pid=${pid%%,*}
  pid=${pid# }
  line=
  { IFS= read -r line <"/proc/$pid/stat"; } 2>/dev/null
  set -- ${line##*) }
  [ "$#" -ge 20 ] && began=${20} || began=0
  group=$(sed -n 's/^0:://p' "/proc/$pid/cgroup" 2>/dev/null | head -n 1)
  name=$(tr '\0\n' '  ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-120)
  put app "$began|$group|$name|$row"
done
put end yes
"""

STAMP = re.compile(r"^\[ *(\d+\.\d+)\] (?:\S+ kernel: )?(.*)$")


@dataclass
class Evidence:
    """The looks of one launch. What cannot be asked is left out, and said in `problems`."""

    context: StepContext
    job: JobIdentity
    problems: list[str] = field(default_factory=list)

    def gather(self) -> HostFacts:
        """Both looks. Raises only what says that the target is another machine now."""
        want = self.context.want
        folder = f"{ROOT}/{self.job.name}/{self.job.id}"
        args = (folder, str(self.job.session), want.playbook.model.path)
        target = self._ask(want.guest, TARGET, args, TARGET_S)
        host = self._ask(Where.HOST, HOST, (), HOST_S)
        return parse_evidence(want, self.job, target, host)

    def _ask(self, where: Where, script: str, args: Sequence[str], limit_s: float) -> str:
        try:
            answer: Answer = self.context.on(where).run(script, args=args, timeout_s=limit_s)
        except REFUSALS:
            raise
        except (StepFailed, Unreachable) as error:
            self.problems.append(f"{where.value}: {error.what}")
            return ""
        return answer.text


def baseline(context: StepContext) -> bytes:
    """The count of kills for memory now, for the folder of a launch; '' where none is kept."""
    answer = context.on(context.want.guest).run(BASELINE, timeout_s=TARGET_S)
    line = answer.text.strip()
    return f"{line}\n".encode() if line.isdigit() else b"\n"


def parse_evidence(want: Deployment, job: JobIdentity, target: str, host: str) -> HostFacts:
    """The facts in both answers; a line that cannot be read is left out."""
    seen, there = _values(target), _values(host)
    now, before = _count(seen, "oom_kills"), _count(seen, "oom_before")
    shm = [int(word) for word in _last(seen, "shm").split() if word.isdigit()]
    ticks = _count(there, "ticks") or 100
    gpus = {}
    for row in there.get("gpu", []):
        parts = [part.strip() for part in row.split(",")]
        if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
            gpus[pci_address(parts[0])] = int(parts[1]) - int(parts[2])
    ours = {address.lower() for address in want.gpus}
    members = tuple(seen.get("member", []))
    return HostFacts(
        oom_kills=None if now is None or before is None else max(0, now - before),
        kernel=tuple(_since(there.get("kernel", []), job.start / ticks)),
        kernel_problem=_last(there, "kernel_problem"),
        container="" if want.vmid is None else str(want.vmid),
        gpus=want.gpus,
        gpu_free_mib={address: mib for address, mib in gpus.items() if address in ours},
        holders=tuple(
            holder
            for row in there.get("app", [])
            if (holder := _holder(row, want, job, members)) is not None and holder.address in ours
        ),
        shm_kib=shm[0] if len(shm) == 2 else None,
        shm_free_kib=shm[1] if len(shm) == 2 else None,
        disks=_disks(seen.get("disk", [])),
        memory_free_kib=_count(seen, "memory_free"),
        nofile=_last(seen, "nofile"),
        members=members,
    )


def _values(text: str) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for line in text.split("\n"):
        key, found, value = line.partition("=")
        if found:
            values.setdefault(key, []).append(value)
    return values


def _last(values: dict[str, list[str]], key: str) -> str:
    return values.get(key, [""])[-1].strip()


def _count(values: dict[str, list[str]], key: str) -> int | None:
    text = _last(values, key)
    return int(text) if text.isdigit() else None


def _since(lines: Sequence[str], began: float) -> list[str]:
    """Of the launch's time; the stamps of the kernel count seconds since boot, as `began` does."""
    found = []
    for line in lines:
        stamp = STAMP.match(line)
        if stamp is not None and float(stamp[1]) >= began - 1:
            found.append(line.strip())
    return found


def _holder(row: str, want: Deployment, job: JobIdentity, members: Sequence[str]) -> Holder | None:
    fields = row.split("|", 3)
    parts = [part.strip() for part in fields[3].split(",", 3)] if len(fields) == 4 else []
    if len(parts) != 4 or not parts[1].isdigit() or not parts[2].isdigit():
        return None
    began, group = fields[0], fields[1]
    if want.vmid is None:
        inside = any(line.split(" ", 1)[0] == parts[1] for line in members)
    else:
        # A group that cannot be read, or is hidden by a namespace, accuses nobody.
        own = rf"/lxc(?:\.payload\.|/){want.vmid}(?:/|$)"
        inside = group in ("", "/") or re.search(own, group) is not None
    earlier = began.isdigit() and 0 < int(began) < job.start
    name = fields[2].strip() or parts[3]
    stranger = earlier or not inside
    return Holder(int(parts[1]), name, int(parts[2]), pci_address(parts[0]), stranger)


def _disks(rows: Sequence[str]) -> tuple[Disk, ...]:
    found = []
    for row in rows:
        free, _, rest = row.partition(" ")
        inodes, _, path = rest.partition(" ")
        if free.isdigit() and path:
            found.append(Disk(path, int(free), int(inodes) if inodes.isdigit() else None))
    return tuple(found)
