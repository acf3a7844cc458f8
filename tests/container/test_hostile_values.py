"""Hostile text in every free-text field: on a real host and guest it never runs as code."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab import INVENTORY, Lab, Machine
from second import HOST

from deployer.deployment import Deployment
from deployer.inventory import InventoryFile
from deployer.model import Facts, PlanState, RunJob, Shell, Where
from deployer.playbook import Playbook
from deployer.session import HostSession
from deployer.sglang.argv import command, server_argv
from deployer.shell import quote
from deployer.state import DeploymentState
from deployer.steps.base import Step
from deployer.steps.driver_install import GUEST_FLAGS, apt_job, dkms_job, run_job
from deployer.steps.order import all_steps
from deployer.steps.server_wanted import server_script
from deployer.steps.shards_download import job_script
from deployer.steps.venv_build import build_job

pytestmark = pytest.mark.container

MARK = "/tmp/hostile-ran"
RUNS = f"touch {MARK}"
PIECES = (
    f"$({RUNS})",
    f"`{RUNS}`",
    f"; {RUNS}; ",
    f"'; {RUNS}; '",
    f'"; {RUNS}; "',
    f"\\'; {RUNS} #",
    f'\\"; {RUNS} #',
    f"&& {RUNS} & ",
    f"| {RUNS} ||",
    f"') ; {RUNS} ; ('",
    f"}}; {RUNS}; {{",
    f"$(({RUNS}))",
    "${IFS}",
    "$HOME",
    "%s%n",
    "*",
    "~",
    "!!",
    "é😀\u2028",
    "-- --help",
    "'\"\\",
    "EOF",
    '"}, {"do": "exit"}',
)
BREAKS = (f"\n{RUNS}\n", f"'\n{RUNS}\n'", "\n")
SHELLS = (["dash"], ["busybox", "sh"])

line = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)
path = line.map(lambda text: f"/nonexistent/{text}/x")
argument = st.lists(st.sampled_from(PIECES + BREAKS), min_size=1, max_size=3).map("".join)
variable = st.one_of(line, line.map(lambda text: f"\t\x1b[31m{text}"))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A playbook with hostile text wherever the model takes free text."""
    digest = "0" * 64
    return {
        "model": {
            "repo": "acme/tiny-hybrid",
            "revision": draw(line),
            "path": draw(path),
            "served_name": draw(line),
            "ignore": [draw(line), draw(line)],
        },
        "download": {
            "endpoint": draw(line),
            "target_endpoint": draw(line),
            "ca_bundle": draw(path),
        },
        "driver": {
            "version": "580.126.09",
            "install": "guest",
            "package": {"url": draw(line), "file": draw(path), "sha256": digest},
        },
        "engine": {
            "version": "0.5.11",
            "python": "3.11",
            "lock": draw(line),
            "venv": draw(path),
            "index_url": draw(line),
            "find_links": [draw(line), draw(path)],
            "ca_bundle": draw(path),
        },
        "serve": {
            "args": {"chat-template": draw(argument), "log-level": draw(argument), "tp-size": 2},
            "env": {"HOSTILE": draw(variable), "OTHER": draw(variable), "EMPTY": ""},
        },
        "variants": [{"name": "first", "args": {"json-model-override-args": draw(argument)}}],
    }


@dataclass(frozen=True)
class Target:
    """kpro6 with one open session for all examples."""

    session: HostSession
    host: Machine
    guest: Machine

    def traces(self) -> str:
        """Where hostile text ran, '' if nowhere."""
        machines: Mapping[str, Machine] = {"host": self.host, "guest": self.guest}
        ran = [name for name, one in machines.items() if one.sh(f"[ -e {MARK} ]").exit == 0]
        return " ".join([*ran, *(["controller"] if Path(MARK).exists() else [])])


def inventory(url: str, gpu: str) -> InventoryFile:
    """kpro6 as the lab has it, with hostile words in its own free-text fields."""
    document = yaml.safe_load((INVENTORY / f"{HOST}.yaml").read_text(encoding="utf-8"))
    document["hosts"][HOST]["deployments"]["tiny"]["url"] = url
    for one in document["hosts"][HOST]["gpus"]:
        one["name"] = gpu
    return InventoryFile.model_validate(document)


def deployment(document: dict[str, Any], url: str = "u", gpu: str = "g") -> Deployment:
    """What `up` would work on."""
    host = inventory(url, gpu).hosts[HOST]
    playbook = Playbook.model_validate(document)
    lock = "".join(f"{piece}\n" for piece in PIECES)
    return Deployment(HOST, "tiny", host, host.deployments["tiny"], playbook, "hostile", lock)


@pytest.fixture(scope="module")
def target(lab: Lab) -> Iterator[Target]:
    """Pristine, so that the steps have changes to plan."""
    lab.reset(HOST)
    Path(MARK).unlink(missing_ok=True)
    session = HostSession(HOST, inventory("u", "g").hosts[HOST], INVENTORY)
    problems: list[str] = []
    yield Target(session, lab.hosts[HOST], lab.guests[HOST])
    session.close(problems.append)
    assert problems == []


def few(examples: int) -> settings:
    """The same few examples every time; a look at a real host has no deadline of its own."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def planned(want: Deployment, facts: Facts) -> list[tuple[Step, Shell | RunJob]]:
    """The scripts of all changes that the steps plan with these facts."""
    found: list[tuple[Step, Shell | RunJob]] = []
    for step in all_steps():
        plan = step.plan(want, facts, DeploymentState())
        for change in plan.changes:
            assert plan.state is PlanState.CHANGES
            assert change.to_dict()["runs"], "what is shown can be built too"
            if isinstance(change.action, Shell | RunJob):
                found.append((step, change.action))
    return found


def jobs_of(want: Deployment) -> list[str]:
    """Scripts that are built when their step acts."""
    package = want.playbook.driver.package
    assert package is not None
    path = package.file or ""
    fetched = package.model_copy(
        update={"file": None, "url": f"https://x/{path}", "ca_bundle": path, "proxy": path}
    )
    build = build_job(want, ["8.6"], 2, "", "")
    return [
        build.script,
        build.files["settings.sh"].decode(),
        run_job(Where.GUEST, package, path, "1.2", GUEST_FLAGS, "d", owned=True).script,
        run_job(
            Where.HOST, fetched, path, "1.2", GUEST_FLAGS, "d", owned=False, module=True
        ).script,
        apt_job(want.playbook.driver.packages, want.playbook.driver.version).script,
        dkms_job(want.playbook.driver.version, path).script,
        job_script(want),
        server_script(want, command(want, server_argv(want))),
    ]


def bare(script: str) -> str:
    """What a shell would read as code: the text outside quotes and comments.

    Double quotes count as code, since `$(` runs in them.
    """
    kept: list[str] = []
    single = double = False
    at = 0
    while at < len(script):
        char = script[at]
        if single:
            single = char != "'"
        elif char == "\\":
            kept.append(script[at : at + 2])
            at += 1
        elif char == "'" and not double:
            single = True
        elif char == "#" and not double and (at == 0 or script[at - 1] in " \n;"):
            at = script.find("\n", at)
            if at < 0:
                break
        else:
            double ^= char == '"'
            kept.append(char)
        at += 1
    assert not single and not double, "quotes are balanced"
    return "".join(kept)


def parses(script: str) -> None:
    """Both shells of the targets can read it."""
    for shell in SHELLS:
        done = subprocess.run([*shell, "-n"], input=script.encode(), capture_output=True)
        assert done.returncode == 0, (shell, done.stderr, script)


def test_the_marker_is_seen(target: Target) -> None:
    for machine in (target.host, target.guest):
        machine.sh(RUNS).ok()
        assert target.traces()
        machine.sh(f"rm {MARK}").ok()
    assert target.traces() == ""
    assert RUNS in bare(f'echo "{PIECES[0]}"')
    assert RUNS not in bare("".join(f"echo {quote(piece)}\n" for piece in PIECES + BREAKS))


@few(15)
@given(document=documents(), url=line, gpu=line)
def test_a_look_runs_nothing(target: Target, document: dict[str, Any], url: str, gpu: str) -> None:
    want = deployment(document, url, gpu)
    facts = target.session.look(want, all_steps())
    assert not facts.silent
    assert target.traces() == ""
    scripts = planned(want, facts)
    assert {step.name for step, _ in scripts} >= {"driver", "gpus"}
    for _, action in scripts:
        parses(action.script)
        assert MARK not in bare(action.script)


@few(40)
@given(document=documents())
def test_scripts_of_changes_hold_it_quoted(document: dict[str, Any]) -> None:
    want = deployment(document)
    for script in jobs_of(want):
        parses(script)
        assert MARK not in bare(script), script


@few(25)
@given(document=documents())
def test_the_server_gets_exactly_these_words(document: dict[str, Any]) -> None:
    want = deployment(document)
    argv = command(want, server_argv(want))
    script = server_script(want, argv)
    before, found, after = script.rpartition("\nexec ")
    assert found
    probe = f'{before}\nprintf \'%s\\0\' "$HOSTILE" "$OTHER" "$EMPTY" {after}'
    wanted = [*want.playbook.serve.env.values(), *argv]
    for shell in SHELLS:
        done = subprocess.run(
            [*shell, "-s"],
            input=probe.encode(),
            capture_output=True,
            timeout=10,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )
        assert done.stdout.decode().split("\0")[:-1] == wanted
        assert done.stderr == b""
    assert not Path(MARK).exists()


@few(25)
@given(document=documents())
def test_settings_of_the_build_are_exactly_these(document: dict[str, Any]) -> None:
    want = deployment(document)
    engine = want.playbook.engine
    build = build_job(want, ["8.6"], 2, "", "")
    names = '"$UV_DEFAULT_INDEX" "$PIP_INDEX_URL" "$SSL_CERT_FILE" "$PIP_CERT" "$BUILD" "$@"'
    links = build.script.partition("\nset --")
    settings_ = build.files["settings.sh"].decode()
    values = links[0].replace(". ./settings.sh", settings_)
    words = links[2].partition("\n")[0]
    probe = f"{values}\nset --{words}\nprintf '%s\\0' {names}\n"
    wanted = [engine.index_url] * 2 + [engine.ca_bundle] * 2
    for shell in SHELLS:
        done = subprocess.run([*shell, "-s"], input=probe.encode(), capture_output=True, timeout=10)
        got = done.stdout.decode().split("\0")[:-1]
        assert got[:4] == wanted
        assert got[4].startswith(f"{engine.venv}.builds/")
        assert got[5:] == [part for link in engine.find_links for part in ("--find-links", link)]
        assert done.stderr == b""
    assert not Path(MARK).exists()


def test_a_hostile_flag_is_refused() -> None:
    document = yaml.safe_load(
        (INVENTORY.parent / "playbooks" / "tiny-hybrid.yaml").read_text(encoding="utf-8")
    )
    for section, values in (
        ("serve", {"args": {f"x $({RUNS})": 1}}),
        ("serve", {"env": {f"X;{RUNS}": "1"}}),
        ("serve", {"env": {"X": f"1\n{RUNS}"}}),
        ("serve", {"host": f"0.0.0.0;{RUNS}"}),
        ("model", {"repo": f"a/b;{RUNS}"}),
        ("model", {"path": f"/a\n{RUNS}"}),
        ("model", {"served_name": f"a\n{RUNS}"}),
        ("engine", {"python": f"3.11;{RUNS}"}),
        ("engine", {"venv": "relative"}),
        ("engine", {"uv_version": f">=0.5;{RUNS}"}),
    ):
        changed = {**document, section: {**document[section], **values}}
        with pytest.raises(ValueError):
            Playbook.model_validate(changed)
