"""What `status` shows and `doctor` finds: facts in, plain data out. Nothing here acts or prints.

`Sight` is a step that only looks: at all GPUs of the host, the host lock, and the target's clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from deployer import gpu
from deployer.deployment import Deployment
from deployer.inventory import Host
from deployer.model import Facts, Plan, Probe, ProbeOutput, Where
from deployer.nvidia_texts import smi_verdict
from deployer.remote.lock_record import Controller, Held, is_stale
from deployer.remote.lock_scripts import parse_read, read_script
from deployer.shell import words
from deployer.state import DeploymentState
from deployer.steps.base import Step
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.driver_facts import HostDriver, HostSmi
from deployer.steps.rolled_back import back_document, record_document
from deployer.steps.server_facts import ServerFact, ServerJob
from deployer.steps.serving_fact import ServingFact
from deployer.steps.shards import pinned
from deployer.steps.shards_facts import ShardsFact

GPUS = r"""
for address in "$@"; do
  device=/sys/bus/pci/devices/$address
  if [ ! -d "$device" ]; then printf 'absent %s\n' "$address"; continue; fi
  driver=
  # A process each for readlink would be slow; `cd` resolves the link too.
  if cd -P "$device/driver" 2>/dev/null; then driver=${PWD##*/}; fi
  cd /
  printf 'gpu %s %s\n' "$address" "$driver"
done
exit 0
"""

# A process that starts now tells the clock that start times count in. /proc/uptime of a container
# is its own and does not.
CLOCK = "getconf CLK_TCK 2>/dev/null || echo 100\ncat /proc/self/stat\n"


@dataclass(frozen=True)
class GpuLinks:
    """PCI address -> the bound driver, '' when none; a GPU that is not there is left out."""

    drivers: tuple[tuple[str, str], ...] = ()
    timed_out: bool = False


@dataclass(frozen=True)
class LockSeen:
    """The host lock. `held` is None when it is free; `problem`: why that is not known."""

    held: Held | None = None
    problem: str = ""


@dataclass(frozen=True)
class ClockFact:
    """The target's clock, in ticks since boot; 0 when it could not be read."""

    now: int = 0
    per_second: int = 100

    def seconds_since(self, start: int) -> float | None:
        """Age of a process with this kernel start time, in seconds."""
        return round((self.now - start) / self.per_second, 1) if self.now >= start > 0 else None


class Sight(Step):
    """What the steps of `up` have no need to look at."""

    name: ClassVar[str] = "observe"

    def probes(self, want: Deployment) -> list[Probe]:
        """Two of the host, one of where the model runs."""
        addresses = words(one.address for one in want.host.gpus)
        return [
            Probe("observe.gpus", Where.HOST, f"set -- {addresses}\n{GPUS}", parse_gpus),
            Probe("observe.lock", Where.HOST, read_script(), parse_lock),
            Probe("observe.clock", want.guest, CLOCK, parse_clock),
        ]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Never anything."""
        return Plan.nothing("it only looks")


def parse_gpus(output: ProbeOutput) -> GpuLinks:
    """The answer of GPUS."""
    rows = [line.split(" ") for line in output.text.splitlines() if line.startswith("gpu ")]
    return GpuLinks(tuple((row[1], row[2]) for row in rows if len(row) == 3), output.timed_out)


def parse_lock(output: ProbeOutput) -> LockSeen:
    """The answer of read_script; its exit 44 means that nobody holds it."""
    if output.exit == 44:
        return LockSeen()
    if output.exit != 0 or output.timed_out:
        told = (output.error_text.strip() or "no answer").splitlines()[-1]
        return LockSeen(problem=f"the host lock could not be read: {told}")
    return LockSeen(parse_read(output.text)[0])


def parse_clock(output: ProbeOutput) -> ClockFact:
    """The answer of CLOCK."""
    ticks, _, stat = output.text.partition("\n")
    fields = stat.rpartition(")")[2].split()
    if not ticks.isdigit() or int(ticks) == 0 or len(fields) < 20 or not fields[19].isdigit():
        return ClockFact()
    return ClockFact(int(fields[19]), int(ticks))


def gpus_document(host: Host, facts: Facts) -> list[dict[str, Any]]:
    """The inventory's GPUs. Memory in MiB; None where nothing is known."""
    links, smi = facts.get(GpuLinks), facts.get(HostSmi)
    known = links is not None and not links.timed_out
    bound = dict(links.drivers) if links is not None else {}
    rows = {row.address: row for row in smi.gpus} if smi is not None else {}
    document = []
    for one in host.gpus:
        row: gpu.SmiGpu | None = rows.get(one.address.lower())
        document.append(
            {
                "address": one.address,
                "present": one.address in bound if known else None,
                "driver": bound.get(one.address, ""),
                "name": row.name if row else one.name or "",
                "memory_used_mib": row.memory_used_mib if row else None,
                "memory_total_mib": row.memory_total_mib if row else None,
            }
        )
    return document


def driver_document(facts: Facts) -> dict[str, str]:
    """The host's kernel module; `problem` says why nvidia-smi shows nothing."""
    driver, smi = facts.get(HostDriver), facts.get(HostSmi)
    return {
        "version": driver.loaded if driver else "",
        "flavour": driver.flavour if driver else "",
        "problem": smi_problem(smi),
    }


def smi_problem(smi: HostSmi | None) -> str:
    """Why nvidia-smi did not answer on the host; '' when it did, or was not asked."""
    if smi is None or not smi.asked:
        return ""
    if smi.timed_out:
        return "nvidia-smi hangs on the host"
    verdict = smi_verdict(smi.exit, smi.text)
    return verdict.cause if verdict is not None else ""


def lock_document(facts: Facts, me: Controller) -> dict[str, Any] | None:
    """Who holds the host lock; None when it is free or was not asked for."""
    seen = facts.get(LockSeen)
    if seen is None or (seen.held is None and not seen.problem):
        return None
    holder = seen.held
    record = holder.record if holder else None
    return {
        "run_id": holder.run_id if holder else "",
        "holder": holder.describe() if holder else "",
        "owner": record.owner if record else "",
        "since": record.since if record else None,
        "step": record.step if record else "",
        "stale": (is_stale(record, me) or "") if record else "",
        "problem": seen.problem,
    }


def container_document(want: Deployment, facts: Facts) -> dict[str, Any] | None:
    """The container as pct shows it; None when the model runs on the host itself."""
    if want.vmid is None:
        return None
    seen = facts.get(ContainerFacts)
    if seen is None or seen.timed_out:
        status, text = "unknown", "pct did not answer"
    else:
        status, text = seen.status or "unknown", "" if seen.status else seen.status_text
    return {
        "vmid": want.vmid,
        "status": status,
        "problem": text,
        "silent": facts.silent.get(Where.GUEST, ""),
    }


def node_document(want: Deployment) -> dict[str, Any] | None:
    """Its place in a server of several nodes; None of a server of its own."""
    if want.node is None:
        return None
    hosts = want.node.hosts
    return {
        "rank": want.node.rank,
        "of": len(hosts),
        "answers": f"{hosts[0]}/{want.name}",
        "problem": "",
    }


def deployment_document(want: Deployment, facts: Facts, state: DeploymentState) -> dict[str, Any]:
    """One deployment as seen now. Times in seconds; `state` is one of

    serving | starting | ended | stopped | none | foreign (another process has the port) | unknown.
    """
    server, serving = facts.get(ServerFact), facts.get(ServingFact)
    job = server.job if server else None
    clock = facts.get(ClockFact) or ClockFact()
    alive = bool(job and job.alive)
    judged = _verdict(job)
    good = judged["verdict"] == "good"
    return {
        "id": want.id,
        "model": want.playbook.model.served_name,
        "port": want.port,
        "node": node_document(want),
        "container": container_document(want, facts),
        "state": _state(server, state),
        "problem": _problem(want, facts, server),
        "launch": job.identity.id if job else "",
        "variant": job.launch.variant if job else "",
        "degraded": job.launch.degraded if job else "",
        "back": back_document(job.launch.back) if job else None,
        "rollback": record_document(state.rollback, want.id),
        "pid": job.identity.pid if job and alive else None,
        "uptime_s": clock.seconds_since(job.identity.start) if job and alive else None,
        "exit": job.exit if job and not alive else "",
        "stopped": _was_stopped(job, state),
        "listening": server.listening if server and server.asked else None,
        "port_owner": [f"pid {one.pid}: {one.command}" for one in server.strangers]
        if server
        else [],
        "answers": (not serving.problem) if serving and alive and good else None,
        "answer_problem": serving.problem if serving and alive and good else "",
        **judged,
        "engine": {
            "name": want.playbook.engine.name,
            "version": server.engine if server else "",
            "wanted": want.playbook.engine.version,
        },
        "weights": _weights(want, facts, state),
    }


def _state(server: ServerFact | None, state: DeploymentState) -> str:
    if server is None or not server.asked:
        return "unknown"
    if server.serving:
        return "serving"
    if server.strangers:
        return "foreign"
    if server.job is None:
        return "none"
    if server.job.alive:
        return "starting"
    return "stopped" if _was_stopped(server.job, state) else "ended"


def _was_stopped(job: ServerJob | None, state: DeploymentState) -> bool:
    """By this tool. A server that is told to stop kills itself at the end: signal 9 is no crash."""
    recorded = {launch.id: launch.verdict for launch in state.launches}
    return job is not None and not job.alive and recorded.get(job.identity.id) == "stopped"


def _problem(want: Deployment, facts: Facts, server: ServerFact | None) -> str:
    if server is None:
        return facts.silent.get(want.guest, "not asked")
    return server.problem


def _verdict(job: ServerJob | None) -> dict[str, Any]:
    """The verdict file of this launch; one of another launch says nothing."""
    none: dict[str, Any] = {"verdict": "", "verified": None, "figures": {}}
    if job is None or not job.verdict:
        return none
    try:
        record = json.loads(job.verdict)
        if record["launch"] != job.identity.id:
            return none
        return {
            "verdict": str(record["verdict"]),
            "verified": float(record["verified"]),
            "figures": {str(name): float(value) for name, value in record["figures"].items()},
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {**none, "verdict": "unreadable"}


def _weights(want: Deployment, facts: Facts, state: DeploymentState) -> dict[str, Any]:
    """`state`: verified | incomplete | present (not compared with a list) | absent | unknown."""
    fact, path = facts.get(ShardsFact), want.playbook.model.path
    document: dict[str, Any] = {"path": path, "state": "unknown", "files": 0, "verified": 0}
    if fact is None or fact.problem or not fact.python:
        return document
    manifest = pinned(want, state)
    if manifest is None:
        document["files"] = len(fact.finished)
        document["state"] = "present" if fact.finished else "absent"
        return document
    document["files"] = len(manifest.files)
    document["commit"] = manifest.commit
    document["verified"] = sum(fact.verified(file) for file in manifest.files)
    if document["verified"] == document["files"]:
        document["state"] = "verified"
    else:
        document["state"] = "incomplete" if fact.files or fact.parts else "absent"
    return document
