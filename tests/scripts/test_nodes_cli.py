"""What `deploy rollback` says of a server of two nodes, with this machine as both of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from test_gc_cli import Box, builds

from deployer import session
from deployer.catalog import Catalog
from deployer.errors import DeployError, Unreachable, UsageError
from deployer.kept import Kept
from deployer.recipe import recipe_of
from deployer.sglang.argv import command, server_argv
from deployer.state import DeploymentState, HostState, Launch, Manifest, ManifestFile
from deployer.state_file import StateFile


class Pair(Box):
    """The hosts h and i of one server; i has another deployment besides."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch)
        inventory, playbook = folder / "inventory/h.yaml", folder / "playbooks/q.yaml"
        host = yaml.safe_load(inventory.read_text())["hosts"]["h"]
        other = {**host, "ssh": {"address": "192.0.2.6"}}
        other["deployments"] = {**host["deployments"], "own": {"playbook": "own", "port": 30200}}
        inventory.write_text(yaml.safe_dump({"hosts": {"h": host, "i": other}}))
        book = yaml.safe_load(playbook.read_text())
        (folder / "playbooks/own.yaml").write_text(yaml.safe_dump(book))
        playbook.write_text(yaml.safe_dump({**book, "nodes": ["h", "i"]}, sort_keys=False))
        self.dark_host = ""
        real, pair = session.HostSession, self

        class Session(real):  # type: ignore[misc, valid-type]
            def __init__(self, host: str, *words: Any) -> None:
                super().__init__(host, *words)
                self.name = host

            def transports(self, want: Any) -> Any:
                if self.name == pair.dark_host:
                    raise Unreachable("no answer", where=self.name)
                return super().transports(want)

        monkeypatch.setattr(session, "HostSession", Session)

    def passed(self, **lacks: str) -> None:
        """Two launches have passed on both; `lacks`: of a host, a launch that it has not."""
        file = ManifestFile(path="a.safetensors", size=7, sha256="s")
        manifest = Manifest(repo="Qwen/Q", asked="main", commit="c0ffee", files=[file])
        kept = Kept(self.folder / ".deploy" / "kept")
        for want in Catalog.load(self.folder / "inventory").select(["h/q"]):
            key = kept.add(recipe_of(want, manifest), want.lock_text)
            argv = command(want, server_argv(want))
            launches = [
                Launch(
                    id=f"2026110{number}-x",
                    started=float(number),
                    verified=2.0,
                    verdict=verdict,
                    fingerprint=f"{want.host_name}{number}",
                    variant="mtp",
                    argv=argv,
                    recipe=key,
                    venv=str(self.folder / "venvs" / "q.builds" / want.host_name),
                )
                for number, verdict in ((1, "stopped"), (2, "good"))
            ]
            kept_launches = [one for one in launches if one.id != lacks.get(want.host_name)]
            own = DeploymentState(launches=kept_launches, manifest=manifest)
            own.known_good = launches[1].id
            state = HostState(host=want.host_name, deployments={"q": own})
            StateFile(self.folder / ".deploy" / "state", want.host_name).save(state)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(tmp_path, monkeypatch)


def test_the_choices_of_all_nodes_and_what_each_lacks(pair: Pair) -> None:
    pair.passed()
    [built] = builds(pair, "i")
    lock = recipe_of(Catalog.load(pair.folder / "inventory").select(["h/q"])[0],
                     Manifest(repo="r", asked="m", commit="c", files=[])).lock  # fmt: skip
    (built / "deployer.json").write_text(json.dumps({"lock": lock}))
    for word in ("h", "h/q", "i/q"):
        done = pair.deploy("rollback", word)
        assert done.return_value == 0
        assert "h/q: goes back to launch 20261101-x" in done.output
        assert "  one server of the nodes h/q, i/q\n" in done.output
        what = "weights: 1 files to fetch (7 bytes)"
        assert f"    h: venv: is built from its lock; {what}\n" in done.output, done.output
        assert f"    i: venv: there; {what}\n" in done.output, done.output
        assert "nothing was changed: add --yes" in done.output
    told = json.loads(pair.deploy("--json", "rollback", "i/q").stdout)
    assert (told["id"], told["nodes"], told["to"]) == ("h/q", ["h/q", "i/q"], "20261101-x")
    assert told["choices"][0]["nodes"]["i"]["venv"] == "there"
    with pytest.raises(UsageError, match="i has 2 deployments") as caught:
        pair.deploy("rollback", "i")
    assert caught.value.fix == "name one of them: i/own, i/q"


def test_a_node_that_is_dark_or_has_no_part_in_it(pair: Pair) -> None:
    pair.passed()
    pair.dark_host = "i"
    done = pair.deploy("rollback", "h")
    assert done.return_value == 3 and "is not known: i: no answer" in done.output
    pair.dark_host = ""
    pair.passed(i="20261101-x")
    done = pair.deploy("rollback", "h")
    assert "nothing to go back to" in done.output, done.output
    with pytest.raises(DeployError, match=r"i/q has no record of its part") as caught:
        pair.deploy("rollback", "h", "20261101-x", "--yes")
    assert caught.value.exit_code == 1
