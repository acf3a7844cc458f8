"""The samples are the documentation: they load, and no key of the models is left out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deployer.catalog import Catalog
from deployer.inventory import InventoryFile
from deployer.names import help_text
from deployer.playbook import Playbook

ROOT = Path(__file__).parents[2]


def test_samples_load_and_join() -> None:
    catalog = Catalog.load(ROOT / "inventory")
    assert [want.id for want in catalog.select([], True)] == ["kpro5/qwen", "kpro6/qwen"]
    want = catalog.select(["kpro5"])[0]
    assert want.variant_name == "mtp"
    assert want.gpus == ("0000:21:00.0", "0000:41:00.0")
    assert "sglang==0.5.11" in want.lock_text.splitlines()
    assert f"sglang=={want.playbook.engine.version}" in want.lock_text


def test_every_playbook_sample_is_used_or_loads() -> None:
    catalog = Catalog.load(ROOT / "inventory")
    document = catalog.documents["kpro5"]
    for path in (ROOT / "playbooks").glob("*.yaml"):
        assert catalog.playbook(path.stem, document, ("hosts",)).lock_text


@pytest.mark.parametrize(("model", "topic"), [(InventoryFile, "inventory"), (Playbook, "playbook")])
def test_every_key_stands_in_a_sample(model: type[BaseModel], topic: Any) -> None:
    text = help_text(topic)
    missing = [
        key for key in sorted(_keys(model)) if not re.search(rf"(?<![\w-]){key}:", text, re.M)
    ]
    assert not missing


def test_samples_state_the_defaults() -> None:
    """Where a sample gives a value to an optional scalar of these sections, it is the default."""
    catalog = Catalog.load(ROOT / "inventory")
    playbook = catalog.select(["kpro5"])[0].playbook
    for name in ("download", "stop", "gates", "rollout"):
        section = getattr(playbook, name)
        assert section == type(section)()


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from deployer.names import help_text; help_text('inventory'); "
        "print(sorted({'pydantic', 'yaml', 'paramiko', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_its_files() -> None:
    assert "# ---- inventory/kpro5.yaml ----" in help_text("inventory")
    assert "# ---- playbooks/qwen3.6-27b.yaml ----" in help_text("playbook")


def _keys(model: type[BaseModel]) -> set[str]:
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return {key for part in parts for key in part.get("properties", {})}
