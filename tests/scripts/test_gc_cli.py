"""`deploy gc` and what `deploy rollback` says, with this machine as the target."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from deployer import collecting, gc_look, session, up
from deployer.catalog import Catalog
from deployer.cli import main
from deployer.errors import DeployError, Unreachable
from deployer.kept import Kept
from deployer.model import Facts, Where
from deployer.recipe import recipe_of
from deployer.remote.batch import gather
from deployer.state import (
    DeploymentState,
    HostState,
    Launch,
    Manifest,
    ManifestFile,
    Migration,
)
from deployer.state_file import StateFile
from tests.local_transport import LocalTransport, shell_path

ROOT = Path(__file__).parents[2]


class Box:
    """A project with one host, whose deployment lies below `folder`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        playbook = yaml.safe_load((ROOT / "playbooks" / "qwen3.6-27b.yaml").read_text())
        playbook["engine"] |= {"venv": str(folder / "venvs" / "q"), "lock": "lock.txt"}
        playbook["model"]["path"] = str(folder / "models" / "now")
        playbook["keep"] = {"venvs": 1, "models": 1, "floor_bytes": 0}
        host = {
            "kind": "plain",
            "ssh": {"address": "192.0.2.5"},
            "gpus": [{"address": "0000:21:00.0"}, {"address": "0000:41:00.0"}],
            "deployments": {"q": {"playbook": "q"}},
        }
        for name, document in (
            ("inventory/h.yaml", {"hosts": {"h": host}}),
            ("playbooks/q.yaml", playbook),
        ):
            (folder / name).parent.mkdir()
            (folder / name).write_text(yaml.safe_dump(document, sort_keys=False))
        (folder / "playbooks" / "lock.txt").write_text("sglang==0.5.11\n")
        self.dark = False
        box = self
        transport = LocalTransport(shell_path("dash", folder / "sh"))

        class Session:
            host_transport = transport

            def __init__(self, *words: Any) -> None: ...

            def transports(self, want: Any) -> Any:
                if box.dark:
                    raise Unreachable("no answer", where="h")
                return dict.fromkeys(Where, transport)

            def look(self, want: Any, steps: Any) -> Facts:
                probes = [probe for step in steps for probe in step.probes(want)]
                return Facts(gather(transport, probes))

            def want_lock(self, run_id: str) -> None: ...

            def entered(self, step: str) -> None: ...

            def wake(self) -> None: ...

            def close(self, on_problem: Any) -> None: ...

        # Nothing of this machine itself.
        monkeypatch.setattr(collecting, "UV_CACHE", str(folder / "cache" / "uv"))
        look = functools.partial(gc_look.look_probe, root=str(folder / "jobs"))
        monkeypatch.setattr(collecting, "look_probe", look)
        monkeypatch.setattr(up, "HostSession", Session)
        monkeypatch.setattr(session, "HostSession", Session)

    def deploy(self, *words: str) -> Result:
        runner = CliRunner()
        return runner.invoke(
            main.group,
            ["-i", str(self.folder / "inventory"), *words],
            standalone_mode=False,
            catch_exceptions=False,
        )

    def want(self) -> Any:
        return Catalog.load(self.folder / "inventory").select(["h"])[0]

    def save(self, own: DeploymentState) -> None:
        host = HostState(host="h", deployments={"q": own})
        StateFile(self.folder / ".deploy" / "state", "h").save(host)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    return Box(tmp_path, monkeypatch)


def builds(box: Box, *names: str) -> list[Path]:
    """The last is the newest."""
    made = []
    for age, name in enumerate(names):
        path = box.folder / "venvs" / "q.builds" / name
        (path / "bin").mkdir(parents=True)
        (path / "complete").touch()
        (path / "bin" / "python").symlink_to("/bin/true")
        (path / "deployer.json").write_text(json.dumps({"lock": name}))
        os.utime(path, (1000 + age, 1000 + age))
        made.append(path)
    return made


def test_gc_shows_and_frees(box: Box) -> None:
    old, older_than, now = builds(box, "a", "b", "c")
    (box.folder / "venvs" / "q").symlink_to(now)
    shown = box.deploy("gc", "h")
    assert shown.return_value == 0
    assert f"{old}: older than the newest 1 (keep.venvs)" in shown.output
    assert f"{now}: {box.folder}/venvs/q points to it" in shown.output
    assert "nothing was freed" in shown.output and old.exists() and older_than.exists()
    told = json.loads(box.deploy("--json", "gc", "h").stdout)
    assert told["freed"] is False
    goes = [row["path"] for row in told["deployments"]["h/q"] if row["goes"]]
    assert sorted(goes) == [str(old), str(older_than)]
    freed = box.deploy("gc", "h", "--yes")
    assert freed.return_value == 0, freed.output
    assert "freed venv" in freed.output and "B freed\n" in freed.output
    assert sorted(path.name for path in old.parent.iterdir()) == ["c"]
    told = json.loads(box.deploy("--json", "--yes", "gc", "h").stdout)
    assert told["freed"] is True and [row["goes"] for row in told["deployments"]["h/q"]] == [False]


def test_gc_frees_the_weights_that_no_launch_needs(box: Box) -> None:
    for name in ("old", "now"):
        path = box.folder / "models" / name
        (path / ".deployer").mkdir(parents=True)
        (path / ".deployer" / "verified.json").write_text(
            json.dumps({"files": {"a": {"size": 1}}}, indent=1)
        )
        (path / "a").write_text("x")
    argv = ["py", "--model-path", str(box.folder / "models" / "old")]
    own = DeploymentState(launches=[Launch(id="1", variant="mtp", started=1.0, argv=argv)])
    own.known_good = "1"
    box.save(own)
    assert (
        "launch 1 had these weights: the known-good launch" in box.deploy("gc", "h", "--yes").output
    )
    own.known_good = ""
    box.save(own)
    assert box.deploy("gc", "h", "--yes").return_value == 0
    assert [path.name for path in (box.folder / "models").iterdir()] == ["now"]


def test_a_state_that_cannot_be_read_stops_only_its_own_host(box: Box) -> None:
    old, _, now = builds(box, "a", "b", "c")
    (box.folder / "venvs" / "q").symlink_to(now)
    broken = box.folder / ".deploy" / "state" / "other.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    done = box.deploy("gc", "h", "--yes")
    assert done.return_value == 2 and "other.json: the state file cannot be used" in done.output
    assert not old.exists()
    broken.rename(broken.with_name("h.json"))
    assert box.deploy("gc", "h", "--yes").return_value == 2


def passed(box: Box) -> tuple[Launch, Launch]:
    """Two launches; the older one can be gone back to."""
    want = box.want()
    manifest = Manifest(repo="Qwen/Q", asked="main", commit="c0ffee", files=[])
    kept = Kept(box.folder / ".deploy" / "kept")
    key = kept.add(recipe_of(want, manifest), want.lock_text)
    given: dict[str, Any] = {"variant": "mtp", "recipe": key}
    old = Launch(id="20261101-a", started=1.0, verified=2.0, verdict="stopped", **given)
    new = Launch(id="20261102-b", started=3.0, fingerprint="2", verdict="good", **given)
    box.save(DeploymentState(launches=[old, new], known_good=new.id, manifest=manifest))
    return old, new


@pytest.mark.parametrize("fault", ["broken", "gone", "no lock", "variant"])
def test_rollback_needs_no_playbook(box: Box, fault: str) -> None:
    old, new = passed(box)
    playbook, inventory = box.folder / "playbooks" / "q.yaml", box.folder / "inventory" / "h.yaml"
    if fault == "broken":
        playbook.write_text("model: [")
    elif fault == "gone":
        playbook.unlink()
    elif fault == "no lock":
        (box.folder / "playbooks" / "lock.txt").unlink()
    else:
        document = yaml.safe_load(inventory.read_text())
        document["hosts"]["h"]["deployments"]["q"]["variant"] = "no-such"
        inventory.write_text(yaml.safe_dump(document))
    done = box.deploy("rollback", "h")
    assert done.return_value == 0 and f"goes back to launch {old.id}" in done.output
    said = f"in its place: what is kept of launch {new.id}"
    assert (said in done.stderr) is (fault != "variant")
    told = json.loads(box.deploy("--json", "rollback", "h/q").stdout)
    assert told["to"] == old.id and len(told["warnings"]) == (fault != "variant")
    assert f"h/q: 2 launches\n  {old.id}" in box.deploy("history", "h").output
    # Nothing is freed by what is not known.
    with pytest.raises(DeployError) as caught:
        if fault != "variant":
            box.deploy("gc", "h", "--yes")
        box.deploy("up", "h", "--yes")
    assert caught.value.exit_code == 2


def test_without_a_playbook_and_without_what_was_kept(box: Box) -> None:
    passed(box)
    playbook = box.folder / "playbooks" / "q.yaml"
    playbook.write_text("model: [")
    kept = box.folder / ".deploy" / "kept"
    [recipe] = kept.glob("*.json")
    recipe.rename(recipe.with_suffix(".gone"))
    with pytest.raises(DeployError, match=r"q.yaml.*in its place: what that launch was made") as it:
        box.deploy("rollback", "h")
    assert it.value.exit_code == 2
    box.save(DeploymentState())
    with pytest.raises(DeployError, match="in its place: nothing is kept of its launches"):
        box.deploy("rollback", "h")
    (box.folder / "inventory" / "h.yaml").write_text("hosts: [")
    with pytest.raises(DeployError, match=r"h.yaml"):
        box.deploy("rollback", "h")


def test_rollback_says_what_there_is(box: Box) -> None:
    assert "nothing to go back to" in box.deploy("rollback", "h").output
    with pytest.raises(DeployError, match="no other launch has passed") as caught:
        box.deploy("rollback", "h", "--yes")
    assert caught.value.exit_code == 1 and "`deploy history h/q`" in caught.value.fix
    want = box.want()
    files = [ManifestFile(path="a", size=5, sha256="0" * 64)]
    manifest = Manifest(repo="Qwen/Q", asked="main", commit="c0ffee", files=files)
    kept = Kept(box.folder / ".deploy" / "kept")
    recipe = recipe_of(want, manifest)
    [build] = builds(box, recipe.lock)
    old = Launch(
        id="20261101-a",
        variant="mtp",
        started=1.0,
        verified=2.0,
        fingerprint="1",
        verdict="stopped",
        venv=str(build),
        recipe=kept.add(recipe, want.lock_text),
        figures={"tokens_per_s": 50.0},
    )
    new = Launch(id="20261102-b", variant="mtp", started=3.0, fingerprint="2", verdict="good")
    box.save(DeploymentState(launches=[old, new], known_good=new.id, manifest=manifest))
    done = box.deploy("rollback", "h")
    assert done.return_value == 0
    assert "h/q: goes back to launch 20261101-a" in done.output
    assert "venv: there; weights: 1 files to fetch (5 bytes)" in done.output
    assert "measured: 50 tokens/s alone" in done.output and "add --yes" in done.output
    told = json.loads(box.deploy("--json", "rollback", "h", "20261101").stdout)
    assert (told["to"], told["now"], told["why"]) == ("20261101-a", new.id, "asked for")
    assert told["choices"][0]["venv"] == "there"
    box.dark = True
    dark = box.deploy("rollback", "h")
    assert dark.return_value == 3 and "venv: not asked" in dark.output
    told = json.loads(box.deploy("--json", "gc", "h").stdout)
    assert told["errors"]["h/q"]["exit_code"] == 3 == told["exit_code"]
    assert json.loads(box.deploy("--json", "--yes", "gc", "h").stdout)["freed"] is False
    acting = box.deploy("rollback", "h", "--yes")
    assert acting.return_value == 3 and "not looked at" in acting.output


def test_no_rollback_in_the_middle_of_a_migration(box: Box) -> None:
    old, new = passed(box)
    own = DeploymentState(launches=[old, new], known_good=new.id)
    own.migration = Migration(id="m", source="h/q", destination="x/q", phase="drain", cut=True)
    box.save(own)
    assert box.deploy("rollback", "h").return_value == 0
    with pytest.raises(DeployError, match="under way: h/q to x/q, phase drain") as caught:
        box.deploy("rollback", "h", "--yes")
    assert "`deploy migrate h/q x/q --abort` takes it back" in caught.value.fix
    own.migration.outcome = "aborted"
    box.save(own)
    box.dark = True
    assert box.deploy("rollback", "h", "--yes").return_value == 3


def test_a_named_launch_that_cannot_be_made_again(box: Box) -> None:
    old, _ = passed(box)
    own = DeploymentState(launches=[old.model_copy(update={"recipe": ""})])
    box.save(own)
    done = box.deploy("rollback", "h", old.id)
    assert done.return_value == 1 and f"h/q: cannot go back to launch {old.id}: what" in done.output
    assert "add --yes" not in done.output
    document = box.deploy("--json", "rollback", "h", old.id)
    assert document.return_value == 1 and json.loads(document.stdout)["choices"][0]["problem"]
    with pytest.raises(DeployError, match="an older version launched it"):
        box.deploy("rollback", "h", old.id, "--yes")
