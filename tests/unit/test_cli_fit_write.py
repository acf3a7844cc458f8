"""`deploy fit MODEL HOST --write`, with a Hub and a host that answer from memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_cli_fit import HYBRID, fit, inventory

# The client puts the hub's folder on the path.
from hubclient import resolve  # isort: skip
from hub import Hub  # isort: skip

from deployer import hub
from deployer.catalog import Catalog
from deployer.cli import fit_write
from deployer.cli.fit_host import Seen
from deployer.document import load
from deployer.errors import StepBlocked, UsageError
from deployer.playbook import Playbook
from deployer.state import Manifest, ManifestFile
from deployer.validation import validate

__all__ = ["inventory"]
CONFIG = next(iter(json.loads(HYBRID.read_text())["models"].values()))["config"]
DENSE = next(iter(json.loads((HYBRID.parent / "dense.json").read_text())["models"].values()))[
    "config"
]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Hub and the host say; tests change it."""
    said: dict[str, Any] = {"config": CONFIG, "size": 55_560_000_000, "mib": 49140}

    def manifest(playbook: Any, token: str | None) -> Manifest:
        files = [
            ManifestFile(path="config.json", size=10, blob_id="b"),
            ManifestFile(path="model.safetensors", size=said["size"], sha256="a" * 64),
        ]
        return Manifest(
            repo=playbook.model.repo, asked=playbook.model.revision, commit="c" * 40, files=files
        )

    def seen(options: Any, want: Any) -> Seen:
        said["asked"] = want
        return Seen(want.id, "NVIDIA RTX A6000", said["mib"], 4)

    monkeypatch.setattr(hub, "fetch_manifest", manifest)
    monkeypatch.setattr(hub, "fetch_text", lambda *args: json.dumps(said["config"]))
    monkeypatch.setattr(fit_write, "fullest_of", seen)
    return said


def test_the_playbook_is_one_and_says_what_it_will_run(
    inventory: Path, world: dict[str, Any]
) -> None:
    target = inventory.parent / "playbooks" / "new.yaml"
    result = fit(inventory, "Qwen/Qwen3.6-27B@v1", "kpro5", "--write", str(target))
    assert result.exception is None and result.return_value == 0
    text = target.read_text()
    assert "# assumed: weights 25.5" in text
    assert "10 requests at once" in text
    entry = (inventory / "kpro5.yaml").read_text().replace("qwen3.6-27b ", "new ")
    (inventory / "kpro5.yaml").write_text(entry)
    locks = inventory.parent / "playbooks" / "locks"
    locks.mkdir()
    (locks / "sglang-0.5.11.txt").write_text("sglang==0.5.11\n")
    (want,) = Catalog.load(inventory).select(["kpro5/qwen"])
    assert want.playbook.model.revision == "v1"
    args = want.serve_args()
    assert (args["tp-size"], args["context-length"]) == (2, 32768)
    assert args["mamba-scheduler-strategy"] == "extra_buffer"
    assert args["reasoning-parser"] == "qwen3"
    assert args["tool-call-parser"] == "qwen3_coder"
    assert "speculative-algorithm" not in want.serve_args("no-mtp")
    assert world["asked"].vmid == 129
    assert "largest" not in text


def test_a_dense_model_has_one_variant(inventory: Path, world: dict[str, Any]) -> None:
    world.update(config=DENSE, size=0)
    target = inventory.parent / "playbooks" / "dense.yaml"
    result = fit(inventory, "acme/dense", "kpro5", "--write", str(target), "--json")
    assert result.exception is None
    assert json.loads(result.stdout) == {"written": str(target)}
    assert "mamba" not in target.read_text()
    assert "- name: base" in target.read_text()


def test_what_does_not_fit_writes_nothing(inventory: Path, world: dict[str, Any]) -> None:
    world["mib"] = 24564
    target = inventory.parent / "playbooks" / "new.yaml"
    error = fit(inventory, "Qwen/Qwen3.6-27B", "kpro5", "--write", str(target)).exception
    assert isinstance(error, StepBlocked)
    assert "does not fit on 2 x 24564 MiB" in error.what
    assert not target.exists()


def test_a_tight_card_gets_a_smaller_context_or_fraction(
    inventory: Path, world: dict[str, Any]
) -> None:
    world["mib"] = 40960
    target = inventory.parent / "playbooks" / "new.yaml"
    assert fit(inventory, "Qwen/Qwen3.6-27B", "kpro5", "--write", str(target)).exception is None
    text = target.read_text()
    fraction = float(text.partition("mem-fraction-static: ")[2].split()[0])
    assert fraction <= 0.88


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("Qwen3.6-27B", "kpro5"), "not a Hub id"),
        (("a/b;rm", "kpro5"), "not a Hub id"),
        (("a/b", "kpro9"), "no host `kpro9`"),
        (("a/b",), "--write needs a host"),
    ],
)
def test_bad_words(
    inventory: Path, world: dict[str, Any], words: tuple[str, ...], what: str
) -> None:
    target = inventory.parent / "playbooks" / "new.yaml"
    error = fit(inventory, *words, "--write", str(target)).exception
    assert isinstance(error, UsageError)
    assert what in str(error.what)
    assert not target.exists()


def test_an_existing_file_is_kept(inventory: Path, world: dict[str, Any]) -> None:
    target = inventory.parent / "playbooks" / "qwen3.6-27b.yaml"
    before = target.read_text()
    error = fit(inventory, "a/b", "kpro5", "--write", str(target)).exception
    assert isinstance(error, UsageError) and "exists" in error.what
    assert target.read_text() == before
    other = fit(inventory, "a/b", "kpro5", "--write", "new.txt").exception
    assert isinstance(other, UsageError) and "no YAML file name" in other.what


def uncommented(text: str) -> str:
    """The text with the further rungs made real."""
    head, mark, rest = text.partition("  # Other sets worth a thought")
    assert mark
    first, _, rest = rest.partition("\n")
    rungs = [
        line.replace("  # ", "  ", 1) if re.match(r"  # (- name|  args:|    )", line) else line
        for line in rest.splitlines()
    ]
    return head + mark + first + "\n" + "\n".join(rungs) + "\n"


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_the_sets_in_the_comments_are_rungs_when_the_marks_are_taken_away(
    inventory: Path, world: dict[str, Any], kind: str
) -> None:
    if kind == "dense":
        world.update(config=DENSE, size=0)
    target = inventory.parent / "playbooks" / "new.yaml"
    assert fit(inventory, "acme/new", "kpro5", "--write", str(target)).exception is None
    before = validate(load(target), Playbook)
    target.write_text(uncommented(target.read_text()))
    after = validate(load(target), Playbook)
    more = after.variants[len(before.variants) :]
    assert after.variants[: len(before.variants)] == before.variants
    assert 1 <= len(more) <= 3
    assert all(rung.args for rung in more)
    assert all(len(line) <= 110 for line in target.read_text().splitlines())


def test_a_model_that_this_engine_cannot_serve_gets_no_playbook(
    inventory: Path, world: dict[str, Any]
) -> None:
    world.update(config={**DENSE, "architectures": ["NanbeigeForCausalLM"]}, size=0)
    target = inventory.parent / "playbooks" / "new.yaml"
    error = fit(inventory, "acme/new", "kpro5", "--write", str(target)).exception
    assert isinstance(error, StepBlocked)
    assert "has no class for NanbeigeForCausalLM" in error.what
    assert not target.exists()


def test_a_real_hub_on_this_machine(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lab's hub speaks the Hub's protocol; only the host is a double."""
    monkeypatch.setattr(
        fit_write, "fullest_of", lambda options, want: Seen(want.id, "card", 49140, 4, "8.6")
    )
    first = fit_write._first
    with Hub(tmp_path / "hub", shards=2, mb=1) as server:

        def at_our_hub(name: str, model: str) -> Playbook:
            book = first(name, model)
            download = book.download.model_copy(update={"endpoint": server.url})
            return book.model_copy(update={"download": download})

        monkeypatch.setattr(fit_write, "_first", at_our_hub)
        assert resolve(server, "config.json")[0] < 400
        target = inventory.parent / "playbooks" / "lab.yaml"
        result = fit(inventory, server.repo.name, "kpro5", "--write", str(target))
    assert result.exception is None
    text = target.read_text()
    assert f"revision: main    # {server.repo.commit}" in text
    assert validate(load(target), Playbook).model.repo == server.repo.name
