"""What is seen of the server: our job, the owner of the port, the venv and the weights it needs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.model import Probe, ProbeOutput
from deployer.remote.jobs import JobIdentity
from deployer.sglang.compat import Problem, check
from deployer.sglang.masking import masked_words
from deployer.sglang.mtphead import has_head, headless
from deployer.steps.server_script import server_script_text
from deployer.steps.server_wanted import LaunchNote

SERVER_COMMAND = re.compile(r"sglang[./]launch_server|\bsglang serve\b")


@dataclass(frozen=True)
class ServerJob:
    """Our newest server job. `alive`: boot id, pid and start time are those recorded."""

    identity: JobIdentity
    alive: bool
    exit: str
    fingerprint: str
    launch: LaunchNote
    verdict: str
    members: tuple[int, ...]
    """Running processes of its session."""
    stuck: tuple[int, ...]
    """Those in D state. Of a launch that is dead, only a reboot of the host ends them."""


@dataclass(frozen=True)
class PortOwner:
    """A process that listens on the wanted port. `job` is the DEPLOYER_JOB of its environment."""

    pid: int
    start: int
    session: int
    ppid: int
    job: str
    command: str

    @property
    def is_server(self) -> bool:
        """Does its command line look like a launch of SGLang?"""
        return bool(SERVER_COMMAND.search(self.command))


@dataclass(frozen=True)
class LeftBehind:
    """A running process of a launch of this deployment that has died; `launch` is its id.

    Its environment names the launch, or it holds the launch's log open for writing. It has left
    the launch's session, or the launch is not the newest.
    """

    pid: int
    start: int
    state: str
    launch: str


@dataclass(frozen=True)
class ServerFact:
    """The server as seen now. `asked` False: the probe did not come to its end (`problem`)."""

    asked: bool = True
    problem: str = ""
    boot: str = ""
    job: ServerJob | None = None
    listening: bool = False
    owners: tuple[PortOwner, ...] = ()
    venv: bool = False
    engine: str = ""
    weights: bool = False
    model_type: str | None = None
    config: str = ""
    """The text of the model's config.json, its first 256 KiB."""
    libc: str = ""
    """glibc of the guest, `2.39`; '' when it has another libc or does not tell."""
    driver: str | None = None
    head: bool | None = None
    """Do the tensors of the index include an MTP head? None without an index."""

    left: tuple[LeftBehind, ...] = ()
    """Not of a launch that is alive."""

    @property
    def leftovers(self) -> dict[str, tuple[int, ...]]:
        """Launch id -> pids of what is provably left of a dead launch, its session included."""
        found: dict[str, tuple[int, ...]] = {}
        if self.job is not None and not self.job.alive and self.job.members:
            found[self.job.identity.id] = self.job.members
        for one in self.left:
            found[one.launch] = (*found.get(one.launch, ()), one.pid)
        return {launch: tuple(sorted(pids)) for launch, pids in found.items()}

    @property
    def strangers(self) -> tuple[PortOwner, ...]:
        """Owners of the port that are not of our job's session."""
        return tuple(owner for owner in self.owners if not self.is_ours(owner))

    @property
    def serving(self) -> bool:
        """Is our job alive, and are all owners of the port its own?"""
        return bool(self.job and self.job.alive and self.owners and not self.strangers)

    def is_ours(self, owner: PortOwner) -> bool:
        """Is it a process of our job's session?"""
        return self.job is not None and owner.pid in self.job.members


def server_probe(want: Deployment) -> Probe:
    """The probe; its fact is ServerFact."""
    return Probe("server", want.guest, server_script_text(want), parse_server, timeout_s=15.0)


def parse_server(output: ProbeOutput) -> ServerFact:
    """The fact of the probe's output."""
    if output.timed_out:
        return ServerFact(asked=False, problem="the look at the server's processes timed out")
    values: dict[str, str] = {}
    lists: dict[str, list[str]] = {
        **{"member": [], "owner": [], "listen": [], "engine": [], "marked": []}
    }
    for line in output.text.split("\n"):
        key, found, value = line.partition("=")
        if not found:
            continue
        if key in lists:
            lists[key].append(value)
        else:
            values[key] = value
    if "now_boot" not in values:
        told = output.error_text.strip().split("\n")[-1]
        return ServerFact(asked=False, problem=f"the look at the server failed: {told}")
    job = _job(values, lists["member"])
    return ServerFact(
        boot=values["now_boot"],
        job=job,
        left=_left(job, lists["marked"]),
        listening=bool(lists["listen"]),
        owners=tuple(owner for line in lists["owner"] if (owner := _owner(line))),
        venv=values.get("venv") == "yes",
        engine=_engine(lists["engine"]),
        weights="config" in values,
        model_type=_config(values.get("config", "")),
        config=values.get("config", ""),
        driver=values.get("driver"),
        libc=values.get("libc", "").removeprefix("glibc").strip(),
        head={"yes": True, "no": False}.get(values.get("head", "")),
    )


def _job(values: dict[str, str], members: list[str]) -> ServerJob | None:
    if "job_id" not in values:
        return None
    pid, start = _number(values.get("job_pid", "")), _number(values.get("job_start", ""))
    boot = values.get("job_boot", "")
    session = _number(values.get("job_session", "")) or pid
    seen = values.get("job_stat", "").split()
    alive = (
        boot == values["now_boot"]
        and len(seen) == 2
        and _number(seen[0]) == start
        and seen[1] not in {"Z", "X"}
    )
    running = [line.split() for line in members]
    return ServerJob(
        JobIdentity(values.get("job_name", ""), values["job_id"], pid, start, boot, session),
        alive,
        values.get("job_exit", ""),
        values.get("job_fingerprint", ""),
        LaunchNote.parse(values.get("job_launch", "")),
        values.get("job_verdict", ""),
        tuple(_number(one[0]) for one in running if len(one) == 3 and one[2] not in {"Z", "X"}),
        tuple(_number(one[0]) for one in running if len(one) == 3 and one[2] == "D"),
    )


def _left(job: ServerJob | None, lines: list[str]) -> tuple[LeftBehind, ...]:
    found = []
    for line in lines:
        fields = line.split(" ")
        if len(fields) != 5 or fields[3] in {"Z", "X"}:
            continue
        one = LeftBehind(_number(fields[0]), _number(fields[1]), fields[3], fields[4])
        own = job is not None and one.launch == job.identity.id
        if own and job is not None and (job.alive or one.pid in job.members):
            continue
        found.append(one)
    return tuple(found)


def _owner(line: str) -> PortOwner | None:
    fields = line.split(" ", 6)
    if len(fields) < 6 or not fields[0].isdigit():
        return None
    pid, start, session, ppid = (_number(one) for one in fields[:4])
    command = " ".join(masked_words(fields[6].strip().split(" "))) if len(fields) > 6 else ""
    return PortOwner(pid, start, session, ppid, "" if fields[5] == "-" else fields[5], command)


def _config(text: str) -> str | None:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    kind = data.get("model_type") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def _engine(folders: list[str]) -> str:
    match = re.fullmatch(r"sglang-(.+)\.dist-info", folders[0]) if folders else None
    return match[1] if match else ""


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def problems_of(want: Deployment, fact: ServerFact, variant: str) -> list[Problem]:
    """What is known to speak against this variant on this engine, model and driver."""
    driver = fact.driver or want.playbook.driver.version
    version = fact.engine or want.playbook.engine.version
    args = want.serve_args(variant)
    known = check(version, args, fact.model_type, driver)
    return [*known, *headless(args, has_head(fact.config, fact.head))]
