"""What a person reads of plans and figures, in which order, and what is refused how."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from deployer import events as ev
from deployer.catalog import Catalog
from deployer.cli.figures import figure_lines, short_figures
from deployer.cli.history import _line as history_line
from deployer.cli.inorder import InOrder
from deployer.cli.main import COMMANDS, group
from deployer.cli.planned import planned_lines
from deployer.cli.summary import print_summary
from deployer.document import load
from deployer.engine import Outcome
from deployer.errors import Unreachable, UsageError
from deployer.inventory import InventoryFile
from deployer.model import Plan
from deployer.names import help_text
from deployer.state import Launch
from deployer.up_result import DeploymentResult
from deployer.validation import validate

ROOT = Path(__file__).parents[2]
FIGURES = {
    "planned_tokens": 56740527.0,
    "max_total_num_tokens": 57809833.0,
    "max_running_requests": 16.0,
    "planned_requests": 16.0,
    "context_len": 4096.0,
    "long_ttft_s": 0.012,
    "burst_requests_per_s": 89.61,
    "tokens_per_s": 569.4,
    "ttft_s": 0.025,
    "parallel_requests": 8.0,
    "parallel_tokens_per_s": 4465.0,
    "parallel_ttft_s": 0.013,
    "server_tokens_per_s": 4542.0,
    "accept_length": 2.689,
    "accept_rate": 0.563,
    "memory_growth_mib": 0.0,
}


def test_figures_are_told_in_words() -> None:
    assert figure_lines(FIGURES) == [
        "speed: 569.4 tokens/s alone, 4,465 tokens/s of 8 together, first token after 0.025 s, "
        "0.013 s of 8 together, 0.012 s after the long prompt, 89.61 requests/s in the burst, "
        "4,542 tokens/s by the server's own count",
        "room: 57,809,833 KV tokens (56,740,527 planned), 16 requests at once (16 planned), "
        "context 4,096, GPU memory +0 MiB under load",
        "speculation: accept length 2.69, accept rate 0.56",
    ]
    assert "_" not in "".join(figure_lines(FIGURES))


def test_few_figures_are_told_without_the_others() -> None:
    assert figure_lines({}) == []
    assert short_figures({}) == ""
    assert figure_lines({"planned_tokens": 4.0}) == ["room: 4 KV tokens planned"]
    assert figure_lines({"gap_s": 0.25}) == ["other: gap s 0.25"]
    assert figure_lines({"parallel_tokens_per_s": 9.0}) == ["speed: 9 tokens/s together"]
    assert short_figures(FIGURES) == (
        "569.4 tokens/s alone, 4,465 tokens/s of 8 together, first token after 0.025 s, "
        "16 requests at once, accept length 2.69, accept rate 0.56"
    )


def planned(runs: str, *, reason: str = "none is there", undo: str = "") -> ev.StepPlanned:
    change = {"title": "install", "reason": reason, "where": "guest", "runs": runs, "undo": undo}
    return ev.StepPlanned("h", "h/d", "driver", "changes", "none is there", "", (change,))


def test_a_plan_shows_the_head_of_a_long_script_and_says_how_much_is_left() -> None:
    script = "\n".join(["VERSION=580.126.09", *(f"line {n}" for n in range(70))])
    lines = planned_lines(planned(script), verbose=False)
    assert lines[:3] == [
        "~ driver     1 change: none is there",
        "    + install  [guest]",
        "      | VERSION=580.126.09",
    ]
    assert lines[-1] == "      | ... 59 more lines; -v shows them"
    assert len(lines) == 15
    assert len(planned_lines(planned(script), verbose=True)) == 73


def test_a_plan_shows_short_scripts_and_diffs_whole() -> None:
    script = "\n".join(f"line {n}" for n in range(13))
    assert planned_lines(planned(script), verbose=False)[-1] == "      | line 12"
    diff = "\n".join(["write /etc/x", "--- a/etc/x", "+++ b/etc/x", "@@ -0,0 +1,40 @@"])
    diff += "".join(f"\n+{n}" for n in range(40))
    assert planned_lines(planned(diff), verbose=False)[-1] == "      | +39"


def test_a_reason_is_said_once() -> None:
    again = planned_lines(planned("a", undo="b"), verbose=False)
    assert not any("because" in line for line in again)
    assert again[-1] == "      undo: b"
    other = planned_lines(planned("a", reason="it runs there"), verbose=False)
    assert "      because it runs there" in other


def note(id_: str, text: str) -> ev.Note:
    event = ev.Note(id_.partition("/")[0], id_, "driver", "info", text)
    return dataclasses.replace(event, time=0.0)


def ended(id_: str) -> ev.RunFinished:
    event = ev.RunFinished(id_.partition("/")[0], id_, 0, "ok")
    return dataclasses.replace(event, time=0.0)


def test_events_of_several_hosts_come_in_the_order_of_the_inventory() -> None:
    seen: list[ev.Event] = []
    shown = InOrder(["a/x", "a/y", "b/x", "c/x"], seen.append)
    third, second = [note("c/x", "1"), ended("c/x")], [note("b/x", "2")]
    for event in (*third, *second):
        shown(event)
    assert seen == []
    first = [note("a/x", "3"), ended("a/x"), note("a/y", "4")]
    for event in first:
        shown(event)
    assert seen == first
    shown(ended("a/y"))
    assert seen == [*first, ended("a/y"), *second]
    shown(ended("b/x"))
    assert seen == [*first, ended("a/y"), *second, ended("b/x"), *third]


def test_a_host_that_could_not_be_asked_holds_nobody_up() -> None:
    seen: list[ev.Event] = []
    shown = InOrder(["a/x", "a/y", "b/x"], seen.append)
    shown(note("b/x", "1"))
    lost = ev.RunFinished("a", "", 3, "dark")
    shown(lost)
    assert seen == [lost, note("b/x", "1")]


def test_what_still_waits_at_the_end_is_shown_in_order() -> None:
    seen: list[ev.Event] = []
    shown = InOrder(["a/x", "b/x", "c/x"], seen.append)
    shown(note("c/x", "1"))
    shown(note("b/x", "2"))
    shown.close()
    assert seen == [note("b/x", "2"), note("c/x", "1")]


@pytest.mark.parametrize("topic", ["inventory", "playbook", "lock"])
def test_a_sample_can_be_sent_into_a_file(topic: str, tmp_path: Path) -> None:
    text = help_text(topic)  # type: ignore[arg-type]
    path = tmp_path / "sample.yaml"
    path.write_text(text)
    if topic == "inventory":
        assert list(validate(load(path), InventoryFile).hosts) == ["kpro5"]
        assert "# ---- inventory/kpro6.yaml ----" in text
    if topic == "lock":
        assert "\nsglang==" in text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["status", "--all", "--jsonl"], "status has no --jsonl"),
        (["history", "--all", "--jsonl"], "history has no --jsonl"),
        (["doctor", "--all", "--jsonl"], "--rehash"),
        (["explain", "x", "--jsonl"], "explain has no --jsonl"),
        (["judge", "x", "--jsonl"], "judge has no --jsonl"),
        (["fit", "x", "--jsonl"], "fit has no --jsonl"),
        (["init", "root@192.0.2.5", "--jsonl"], "init has no --jsonl"),
        (["trust", "kpro5", "--json"], "trust has no --json"),
        (["unlock", "kpro5", "--json"], "unlock has no --json"),
        (["help", "--json"], "help has no --json"),
        (["restart", "kpro5", "--json"], "--json never applies without --yes"),
    ],
)
def test_a_form_of_output_that_a_command_lacks_is_refused(words: list[str], what: str) -> None:
    """Not left out in silence: a program would take the text on stdout for its JSON."""
    done = CliRunner().invoke(group, ["-i", str(ROOT / "inventory"), *words])
    assert isinstance(done.exception, UsageError)
    assert what in str(done.exception)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["up"], ["kpro5", "kpro6"]),
        (["logs", "kpro6"], ["kpro6"]),
        (["plan", "kpro5/"], ["kpro5/qwen"]),
        (["migrate", "kpro7"], []),
        (["status", "nix/"], []),
    ],
)
def test_the_shell_completes_hosts_and_deployments(typed: list[str], offered: list[str]) -> None:
    folder = str(ROOT / "inventory")
    begun = typed[1] if len(typed) > 1 else ""
    shell = ShellComplete(group, {}, "deploy", "_DEPLOY_COMPLETE")
    found = shell.get_completions(["-i", folder, typed[0]], begun)
    assert [one.value for one in found] == offered


def test_a_broken_inventory_completes_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("hosts: [")
    shell = ShellComplete(group, {}, "deploy", "_DEPLOY_COMPLETE")
    assert shell.get_completions(["-i", str(tmp_path), "up"], "k") == []


def commands() -> list[click.Command]:
    context = click.Context(group, info_name="deploy")
    found = [group.get_command(context, name) for name in COMMANDS]
    return [command for command in found if command is not None]


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(commands()) == len(COMMANDS)
    assert not [name for name in COMMANDS if not re.search(rf"deploy {name}\b", readme)]


def test_every_command_and_every_option_has_its_help() -> None:
    for command in [group, *commands()]:
        assert command.help, command.name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, (command.name, parameter.name)


def test_the_readme_names_no_command_and_no_option_that_is_not_there() -> None:
    readme = (ROOT / "README.md").read_text()
    ours = [line for line in re.findall(r"\bdeploy (?:-[^\n`]*|[a-z-]+)[^\n`]*", readme)]
    words = {
        option
        for command in [group, *commands()]
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in (*parameter.opts, *parameter.secondary_opts)
    } | {"-h", "--help", "--version"}
    strange = [
        (line, word)
        for line in ours
        for word in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line.split("#")[0])
        if word not in words
    ]
    assert not strange


def test_the_exit_codes_of_the_help_are_those_of_the_errors() -> None:
    from deployer import errors
    from deployer.cli.help import EXIT_CODES

    told = {int(line.split()[0]) for line in EXIT_CODES.splitlines()}
    ours = [one for one in vars(errors).values() if isinstance(one, type)]
    codes = {one.exit_code for one in ours if issubclass(one, errors.DeployError)}
    assert codes | {0, 6} == told


def test_json_of_a_usage_error_is_no_half_document() -> None:
    done = CliRunner().invoke(group, ["-i", "/nowhere", "status", "--all", "--json"])
    assert isinstance(done.exception, UsageError)
    with pytest.raises(json.JSONDecodeError):
        json.loads(done.stdout)


def test_a_path_of_the_inventory_is_shown_without_detours(tmp_path: Path) -> None:
    text = (ROOT / "inventory" / "kpro6.yaml").read_text()
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "x.yaml").write_text(
        text.replace("address: 192.0.2.6", "address: 192.0.2.6\n      known_hosts: ../keys/../kh")
    )
    ssh = Catalog.load(tmp_path / "inventory").hosts["kpro6"].ssh
    assert ssh.known_hosts == str(tmp_path.resolve() / "keys" / ".." / "kh")


def test_what_passed_and_was_stopped_is_told_as_both() -> None:
    launch = Launch(id="20261130-1", variant="mtp", started=5.0, fingerprint="1", verdict="stopped")
    assert " stopped" in history_line(launch, False)
    assert "good" not in history_line(launch, False)
    launch.verified = 6.0
    launch.figures["tokens_per_s"] = 50.0
    assert history_line(launch, True) == (
        "* 20261130-1             1970-01-01 00:00:05Z  mtp        good; stopped since  "
        "(50 tokens/s alone)"
    )


def test_failures_of_a_plan_are_on_stderr_and_the_rest_is_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fine = DeploymentResult("a/x", outcome=Outcome({"venv": Plan.nothing("as wanted")}))
    dark = DeploymentResult("b/x", error=Unreachable("no answer", where="b", fix="is it on?"))
    print_summary([fine, dark], True, err=False)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "a/x: nothing to do",
        "1 of 2 deployments looked at, 1 failed; nothing was changed",
    ]
    assert err.splitlines() == ["deploy: b: no answer", "  -> is it on?"]
    print_summary([fine, dark], True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verb", ["unlock", "trust"])
def test_one_host_that_cannot_be_asked_leaves_the_next_one_its_turn(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(name: str, *words: object) -> None:
        asked.append(name)
        raise Unreachable("no answer", where=name, fix="is it on?")

    monkeypatch.setattr("deployer.cli.unlock.open_host", refuse)
    monkeypatch.setattr("deployer.cli.trust.fetch", refuse)
    words = ["-i", str(ROOT / "inventory"), verb, "kpro5", "kpro6", "kpro5", "--yes"]
    done = CliRunner().invoke(group, words, standalone_mode=False)
    assert (done.return_value, asked) == (3, ["kpro5", "kpro6"])
    assert done.stderr.count("  -> is it on?") == 2
    done = CliRunner().invoke(group, [*words, "nowhere"], standalone_mode=False)
    assert isinstance(done.exception, UsageError) and len(asked) == 2, "all words are read first"
