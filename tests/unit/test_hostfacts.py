"""What the machine says about a failed launch, and what it makes of the log's answer."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from serverworld import IDENTITY, FakeJobs, FakeTransport, context, deployment, state

from deployer.errors import CommandOverdue, ConnectionLost, DeployError, Interrupted
from deployer.remote.transport import Answer
from deployer.sglang.failure import Failure
from deployer.sglang.failures import classify
from deployer.sglang.hostfacts import Disk, Holder, HostFacts, weigh
from deployer.steps.launch_evidence import (
    BASELINE,
    HOST,
    TARGET,
    Evidence,
    baseline,
    parse_evidence,
)
from deployer.steps.stop_drain import drain
from deployer.steps.stop_leftovers import held
from tests.local_transport import SHELLS, LocalTransport, shell_path

WANT = deployment()
OOM = (
    "[12.5] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=ns,mems_allowed=0,"
    "oom_memcg=/lxc/129,task_memcg=/lxc/129/ns/user.slice,task=sglang::schedul,pid=505781,uid=0"
)
KILLED = (
    "[12.5] Memory cgroup out of memory: Killed process 505781 (sglang::schedul) "
    "total-vm:99kB, anon-rss:1kB"
)
XID = "[13.1] NVRM: Xid (PCI:0000:21:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"
STRANGER = Holder(77, "ollama serve", 40960, "0000:21:00.0", True)


def failure(cls: str, cause: str = "") -> Failure:
    return Failure(cls, cause, "look", True)


def weighed(cls: str, facts: HostFacts, code: int | None = -9) -> str:
    return weigh(failure(cls), code, facts).cls


@pytest.mark.parametrize("cls", ["killed", "child-killed", "nccl", "unknown", "worker-died"])
def test_a_kill_for_memory_is_the_cause_of_what_only_died(cls: str) -> None:
    by_kernel = weigh(failure(cls), -9, HostFacts(kernel=(OOM, KILLED), container="129"))
    assert by_kernel.cls == "host-out-of-memory"
    assert "sglang::schedul" in by_kernel.cause_line
    assert not by_kernel.next_variant_allowed
    assert weighed(cls, HostFacts(oom_kills=1)) == "host-out-of-memory"
    assert weighed(cls, HostFacts(oom_kills=0)) == cls


def test_a_kill_in_another_container_is_not_ours() -> None:
    other = tuple(line.replace("/lxc/129", "/lxc/1290") for line in (OOM, KILLED))
    assert weighed("killed", HostFacts(kernel=other, container="129")) == "killed"
    assert weighed("killed", HostFacts(kernel=other, container="1290")) == "host-out-of-memory"
    stranger = KILLED.replace("sglang::schedul", "postgres")
    assert weighed("killed", HostFacts(kernel=(stranger,))) == "killed"


def test_what_names_its_cause_is_not_overruled() -> None:
    facts = HostFacts(oom_kills=3, shm_kib=64, shm_free_kib=0, disks=(Disk("/tmp", 0, 0),))
    for cls in ("bad-arguments", "weights-corrupt", "port-in-use", "not-enough-memory"):
        assert weigh(failure(cls), 1, facts) == failure(cls)


def test_died_without_a_word() -> None:
    facts = HostFacts(oom_kills=1)
    assert weighed("died-silent", facts, 137) == "host-out-of-memory"
    assert weighed("died-silent", facts, 1) == "died-silent"


def test_a_broken_gpu_of_ours() -> None:
    ours = HostFacts(kernel=(XID,), gpus=("0000:21:00.0",))
    told = weigh(failure("cuda-fault", "CUDA error: unspecified"), -9, ours)
    assert (told.cls, told.cause_line) == ("gpu-broken", XID)
    assert weighed("cuda-fault", HostFacts(kernel=(XID,), gpus=("0000:41:00.0",))) == "cuda-fault"
    by_program = XID.replace("): 79,", "): 31,")
    assert weighed("cuda-fault", HostFacts(kernel=(by_program,))) == "cuda-fault"


@pytest.mark.parametrize("cls", ["not-enough-memory", "out-of-memory", "gpu-occupied"])
def test_a_stranger_on_the_gpu(cls: str) -> None:
    told = weigh(
        failure(cls, "RuntimeError: Not enough memory."), -9, HostFacts(holders=(STRANGER,))
    )
    assert told.cls == "gpu-occupied"
    assert "pid 77 (ollama serve) holds 40960 MiB of GPU 0000:21:00.0" in told.cause_line
    assert "Not enough memory" in told.cause_line
    assert not told.next_variant_allowed
    small = HostFacts(holders=(Holder(5, "Xorg", 90, "0000:21:00.0", True),))
    assert weighed(cls, small) == cls


def test_shared_memory_and_disks() -> None:
    shm = HostFacts(shm_kib=65536, shm_free_kib=8)
    assert weighed("nccl", shm) == "shared-memory-full"
    assert weighed("crashed", shm) == "shared-memory-full"
    assert weighed("not-enough-memory", shm) == "not-enough-memory"
    full = HostFacts(disks=(Disk("/srv", 10**9, 10**6), Disk("/root/.cache", 0, 5)))
    told = weigh(failure("exception"), -9, full)
    assert (told.cls, "/root/.cache" in told.cause_line) == ("disk-full", True)
    assert weighed("exception", HostFacts(disks=(Disk("/x", 10**6, None),))) == "exception"


def test_nothing_seen_is_said_so() -> None:
    seen = weigh(failure("killed"), -9, HostFacts(oom_kills=0))
    assert "no kill for memory was seen" in seen.action
    denied = HostFacts(oom_kills=0, kernel_problem="dmesg: Operation not permitted")
    assert "Operation not permitted" in weigh(failure("killed"), -9, denied).action
    assert HostFacts().lines() == ()
    assert classify("Killed\n", -9, "starting", HostFacts()).cls == "died-silent"


HOST_TEXT = f"""\
ticks=100
kernel=[    5.000001] NVRM: Xid (PCI:0000:21:00): 79, before the launch
kernel={XID}
kernel=[   14.000001] kpro5 kernel: Out of memory: Killed process 9 (python3)
kernel=no stamp, Out of memory
gpu=00000000:21:00.0, 49140, 48000
gpu=00000000:41:00.0, 49140, 1
gpu=00000000:81:00.0, [N/A], 1
app=300|/lxc/130/ns|ollama serve |00000000:21:00.0, 77, 40960, /usr/bin/ollama
app=1400|/lxc/129/ns|sglang::scheduler |00000000:21:00.0, 78, 300, [Not Found]
app=1400|/system.slice|x |00000000:81:00.0, 79, 300, x
app=1400|/|sglang::scheduler_TP1 |00000000:41:00.0, 81, 2000, x
app=0||| 00000000:41:00.0, 80, 5000, gone
app=broken
end=yes
"""
TARGET_TEXT = """\
oom_kills=4
oom_before=3
shm=65536 1024
disk=0 0 /root/.cache
disk=100 - /srv/with space
disk=x y z
memory_free=12345
nofile=1024
member=4250 D sglang::scheduler
end=yes
"""


def test_the_looks_are_read() -> None:
    facts = parse_evidence(WANT, IDENTITY, TARGET_TEXT, HOST_TEXT)
    assert facts.oom_kills == 1
    assert (facts.shm_kib, facts.shm_free_kib) == (65536, 1024)
    assert facts.disks == (Disk("/root/.cache", 0, 0), Disk("/srv/with space", 100, None))
    # The launch began 10 s after boot.
    assert len(facts.kernel) == 2
    assert facts.kernel[0] == XID
    assert facts.gpu_free_mib == {"0000:21:00.0": 1140, "0000:41:00.0": 49139}
    assert [holder.pid for holder in facts.holders if holder.stranger] == [77]
    assert [holder.pid for holder in facts.strangers] == [77]
    assert {holder.pid for holder in facts.holders} == {77, 78, 80, 81}
    told = "\n".join(facts.lines())
    assert "ollama serve" in told and "4250 D" in told and "/root/.cache: 0 KiB" in told


def test_no_answer_is_no_fact() -> None:
    empty = parse_evidence(WANT, IDENTITY, "", "")
    assert empty.oom_kills is None
    assert empty.lines() == ()
    torn = parse_evidence(WANT, IDENTITY, TARGET_TEXT[:25], HOST_TEXT[:90])
    assert torn.shm_kib is None


def test_a_target_that_is_gone_leaves_the_log_its_word() -> None:
    def lost(script: str) -> Answer:
        raise ConnectionLost("the connection is lost", where="kpro5")

    made, _ = context(
        WANT, state(), FakeJobs(), host=FakeTransport(lost), guest=FakeTransport(lost)
    )
    evidence = Evidence(made, IDENTITY)
    assert evidence.gather().lines() == ()
    assert len(evidence.problems) == 2


@pytest.mark.parametrize("shell", SHELLS)
def test_the_looks_run_for_real(shell: str, tmp_path: Path) -> None:
    transport = LocalTransport(shell_path(shell, tmp_path))
    (tmp_path / "oom-kills").write_text("0\n", encoding="utf-8")
    session = os.getsid(0)
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    target = transport.run(TARGET, args=(str(tmp_path), str(session), "/nowhere"), timeout_s=30)
    host = transport.run(HOST, timeout_s=40)
    assert (target.exit, host.exit) == (0, 0)
    assert target.text.endswith("end=yes\n") and host.text.endswith("end=yes\n")
    facts = parse_evidence(WANT, IDENTITY, target.text, host.text)
    assert facts.shm_kib
    assert str(tmp_path) in {disk.path for disk in facts.disks}
    assert any(line.startswith(f"{os.getpid()} ") for line in facts.members)
    assert not any(line.startswith(f"{dead.pid} ") for line in facts.members), "a zombie"
    dead.wait()
    count = transport.run(BASELINE, timeout_s=10).text.strip()
    assert count == "" or count.isdigit()


def test_a_kernel_log_that_may_not_be_read(tmp_path: Path) -> None:
    for tool in ("dmesg", "journalctl"):
        fake = tmp_path / tool
        fake.write_text(f"#!/bin/sh\necho '{tool}: Operation not permitted' >&2\nexit 1\n")
        fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    answer = LocalTransport(path).run(HOST, timeout_s=40)
    facts = parse_evidence(WANT, IDENTITY, "", answer.text)
    assert facts.kernel_problem == "dmesg: Operation not permitted"


def test_the_count_before_a_launch() -> None:
    for text, expected in ((b"7\n", b"7\n"), (b"", b"\n"), (b"no such\n", b"\n")):
        guest = FakeTransport(lambda script, text=text: Answer(0, text, b""))
        made, _ = context(WANT, state(), FakeJobs(), guest=guest)
        assert baseline(made) == expected


@pytest.mark.parametrize("error", [CommandOverdue("over its time"), Interrupted("interrupted")])
def test_the_end_of_the_whole_command_is_no_unanswered_look(error: DeployError) -> None:
    """The alarm of --timeout comes once: a wait that takes it for an answer never ends."""

    def overdue(script: str) -> Answer:
        raise error

    made, _ = context(
        WANT, state(), FakeJobs(), host=FakeTransport(overdue), guest=FakeTransport(overdue)
    )
    with pytest.raises(type(error)):
        Evidence(made, IDENTITY).gather()
    with pytest.raises(type(error)):
        held(made, IDENTITY)
    with pytest.raises(type(error)):
        drain(made, IDENTITY, 60.0, lambda: True, time.monotonic, time.sleep)
