"""Broken files: each ends in one DocumentError with place, finding and way out."""

from __future__ import annotations

import os
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployer import names, yamltree
from deployer.document import Document, load, parse
from deployer.errors import DocumentError
from deployer.inventory import InventoryFile
from deployer.playbook import Playbook
from deployer.validation import validate
from deployer.yamltree import plain_value

FILE = Path("/nowhere/inventory/x.yaml")

HOST = """\
hosts:
  kpro5:
    ssh:
      address: 192.0.2.5
    gpus:
      - address: 0000:21:00.0
"""


@pytest.fixture(params=["pure", "fast"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    fast = getattr(yaml, "CSafeLoader", None)
    if request.param == "fast" and fast is None:
        pytest.skip("PyYAML has no libyaml here")
    monkeypatch.setattr(yamltree, "PARSER", fast if request.param == "fast" else yaml.SafeLoader)
    return str(request.param)


def refused(text: str) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        parse(FILE, text)
    return caught.value


def invalid(text: str, model: type = InventoryFile) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        validate(parse(FILE, text), model)
    return caught.value


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "1:1", "the file is empty"),
        ("# only a comment\n", "1:1", "the file is empty"),
        ("---\n", "2:1", "the file is empty"),
        ("- a\n", "1:1", "expected a mapping at the top of the file, found a list"),
        ("just text", "1:1", 'found "just text"'),
        ("a: 1\nb: 2\na: 3\n", "3:1", "duplicate key `a`; it stands at line 1"),
        ("x:\n  129: 1\n  '129': 2\n", "3:3", "duplicate key `129`"),
        ("a: 1\n---\nb: 2\n", "2:1", "second document"),
        ("a: *b\n", "1:4", "alias *b has no anchor"),
        ("a: &a [*a]\n", "1:8", "alias *a has no anchor"),
        ("a: !!python/object:os.system {}\n", "1:4", "tag"),
        ("a: !secret x\n", "1:4", "tag"),
        ("? [a]\n: 1\n", "1:3", "a key must be text or a whole number, found a list"),
        ("yes: 1\n", "1:1", "a key must be text"),
        ('a: "x\\0y"\n', "1:4", "NUL"),
        ("a: \x07\n", "1:4", "U+0007"),
        ("<<: 3\n", "1:1", "needs a mapping"),
        ("a: " + "[" * 40 + "]" * 40, "1:35", "levels deep"),
    ],
)
def test_refused_with_place(parser: str, text: str, place: str, words: str) -> None:
    error = refused(text)
    assert words in error.what
    assert error.where == f"{FILE}:{place}"
    assert error.fix
    assert error.exit_code == 2


@pytest.mark.parametrize("text", ["a: [1, 2\n", "a: 'open\n", "a: b: c\n", "a: @x\n"])
def test_syntax_error_names_a_line(parser: str, text: str) -> None:
    error = refused(text)
    assert "not valid YAML" in error.what
    assert error.where.startswith(f"{FILE}:")
    assert "\n" not in error.what


def test_tab_is_named(parser: str) -> None:
    error = refused("a:\n\tb: 1\n")
    assert error.what == "not valid YAML: a tab in the indentation"
    assert error.where == f"{FILE}:2:1"
    assert "spaces" in error.fix


def test_alias_bomb_is_refused_unexpanded(parser: str) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "aliases" in refused("\n".join(lines)).what


def test_alias_chain_does_not_escape_the_depth_limit(parser: str) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 500)]
    assert "levels" in refused("\n".join(lines)).what


def test_very_deep_file_is_refused(parser: str) -> None:
    assert refused("a: " + "[" * 100_000).where
    assert refused("\n".join(" " * i + f"k{i}:" for i in range(500))).where


def test_anchor_and_merge(parser: str) -> None:
    data = parse(FILE, "base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\nagain: *b\n")
    assert data.data["use"] == {"x": 1, "y": 3}
    assert data.data["again"] == {"x": 1, "y": 2}
    assert data.where(("use", "x")) == f"{FILE}:1:14"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0000:21:00.0", "0000:21:00.0"),
        ("21:00", "21:00"),
        ("2026-11-30", "2026-11-30"),
        ("0.5.11", "0.5.11"),
        ("0129", "0129"),
        ("0x10", "0x10"),
        ("30000", 30000),
        ("5_000", 5000),
        ("-1", -1),
        ("0.88", 0.88),
        ("1e5", 1e5),
        ("1e999", "1e999"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("9" * 5000, "9" * 5000),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("", None),
        ("none", "none"),
        ("٣", "٣"),
    ],
)
def test_plain_value(text: str, value: object) -> None:
    got = plain_value(text)
    assert got == value
    assert type(got) is type(value)


def test_quoted_text_stays_text(parser: str) -> None:
    assert parse(FILE, "a: '1'\nb: \"yes\"\nc: |\n  12\n").data == {
        "a": "1",
        "b": "yes",
        "c": "12\n",
    }


def test_missing_folder_large_and_foreign_files(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    with pytest.raises(DocumentError, match=r"no\.yaml: file not found"):
        load(missing)
    with pytest.raises(DocumentError, match="folder, not a file"):
        load(tmp_path)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"a" * 10_000_000)
    with pytest.raises(DocumentError, match="too large: 10000000 bytes"):
        load(large)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: 1\nb: Gerät\n".encode("latin-1"))
    with pytest.raises(DocumentError, match="not UTF-8 text: byte 0xe4") as caught:
        load(latin)
    assert caught.value.where == f"{latin}:2:7"
    with pytest.raises(DocumentError):
        load(Path("/nowhere/\0.yaml"))


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(DocumentError, match="not a regular file"):
        load(tmp_path / "pipe.yaml")


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    loaded = load(path)
    assert loaded.data == {"a": 1, "b": "x"}
    assert loaded.where(("b",)) == f"{path}:2:4"


def test_positions_of_keys_and_values() -> None:
    loaded = parse(FILE, HOST)
    at = ("hosts", "kpro5", "gpus", 0, "address")
    assert loaded.where(at) == f"{FILE}:6:18"
    assert loaded.where(at, key=True) == f"{FILE}:6:9"
    assert loaded.where((*at, "not", "there")) == f"{FILE}:6:9"
    assert loaded.name(at) == "hosts.kpro5.gpus[0].address"
    assert validate(loaded, InventoryFile).hosts["kpro5"].gpus[0].address == "0000:21:00.0"


def test_unknown_key_with_the_nearest_one() -> None:
    error = invalid(HOST.replace("gpus:", "gpuss:"))
    assert error.what == "unknown key `gpuss` in hosts.kpro5; did you mean `gpus`?"
    assert error.where == f"{FILE}:5:5"
    assert error.evidence == ("line 2: the key `gpus` is missing in hosts.kpro5",)


def test_unknown_key_far_from_all() -> None:
    error = invalid(HOST + "    zzz: 1\n")
    assert error.what == "unknown key `zzz` in hosts.kpro5"
    assert "kind, ssh, gpus, containers, deployments" in error.fix


def test_unknown_key_at_the_top() -> None:
    error = invalid(HOST + "host: {}\n")
    assert error.what == "unknown key `host` in the top of the file; did you mean `hosts`?"


@pytest.mark.parametrize(
    ("old", "new", "what", "fix"),
    [
        ("0000:21:00.0", "21:00.0", 'like 0000:21:00.0, found "21:00.0"', '"0000:21:00.0"'),
        ("0000:21:00.0", "0000:4A:00.0", 'found "0000:4A:00.0"', '"0000:4a:00.0"'),
        ("0000:21:00.0", "00000000:21:00.0", "PCI address", '"0000:21:00.0"'),
        ("192.0.2.5", "192.0.2.5\n      port: 0", "a port number from 1 to 65535, found 0", ""),
        ("192.0.2.5", "192.0.2.5\n      port: 70000", "1 to 65535, found 70000", ""),
        ("192.0.2.5", "192.0.2.5\n      port: '22'", 'found "22"', "without quotes"),
        ("192.0.2.5", "192.0.2.5\n      port: yes", "found true", ""),
        ("192.0.2.5", "-oProxyCommand=x", "a host name or an IP address", ""),
        ("192.0.2.5", '"a\\nb"', "a host name or an IP address", ""),
        ("192.0.2.5", "5", "expected text, found 5", "quotes"),
        ("192.0.2.5", "", "expected text, found nothing", "default"),
        ("kpro5", "KPRO5", "lower-case letters", ""),
        ("gpus:\n      - address: 0000:21:00.0", "gpus: []", "at least 1 entry", ""),
        ("gpus:\n", "kind: proxmocks\n    gpus:\n", "proxmox or plain", "did you mean `proxmox`?"),
        ("gpus:\n", "containers: {99: {}}\n    gpus:\n", "vmid) from 100", ""),
        ("gpus:\n", "containers: {x: {}}\n    gpus:\n", "a whole number", ""),
        ("gpus:\n", "containers: [1]\n    gpus:\n", "a mapping, found a list", ""),
    ],
)
def test_wrong_value(old: str, new: str, what: str, fix: str) -> None:
    error = invalid(HOST.replace(old, new, 1))
    assert what in error.what
    assert fix in error.fix
    assert error.fix
    assert "[key]" not in error.what


def test_several_problems_first_of_the_file_leads() -> None:
    error = invalid(
        HOST.replace("0000:21:00.0", "21:00.0").replace("192.0.2.5", "7") + "    q: 1\n"
    )
    assert error.where == f"{FILE}:4:16"
    assert "address: expected text" in error.what
    assert len(error.evidence) == 2
    assert error.evidence[0].startswith("line 6: hosts.kpro5.gpus[0].address")


PLAYBOOK = """\
model:
  repo: Qwen/Qwen3.6-27B
  path: /srv/models/q
  served_name: q
driver:
  version: 580.126.09
engine:
  version: 0.5.11
  lock: locks/x.txt
  venv: /opt/v
serve:
  args:
    tp-size: 2
"""


@pytest.mark.parametrize(
    ("old", "new", "what", "fix"),
    [
        ("/srv/models/q", '"/srv/a\\nb"', "an absolute path", ""),
        ("/srv/models/q", "srv/q", "an absolute path", ""),
        ("tp-size: 2", "tp-size: [2]", "serve.args.tp-size: expected true, false, a number", ""),
        ("tp-size: 2", "tp-size:", "found nothing", "default"),
        ("tp-size", "--tp-size", "without leading dashes", ""),
        ("580.126.09", "580.126", "driver.version: expected text, found 580.126", "quotes"),
        ("0.5.11", "0.5.11\n  python: 3.12", "engine.python: expected text", "quotes"),
        ("repo: Qwen/Qwen3.6-27B", "repo: Qwen", "a Hub id like", ""),
        ("  args:\n", "  env: {A: 1}\n  args:\n", "serve.env.A: expected text, found 1", "quotes"),
        ("served_name: q", "served_nam: q", "did you mean `served_name`?", ""),
        ("  lock: locks/x.txt\n", "", "the key `lock` is missing in engine", "add `lock:`"),
    ],
)
def test_wrong_playbook_value(old: str, new: str, what: str, fix: str) -> None:
    error = invalid(PLAYBOOK.replace(old, new, 1), Playbook)
    assert what in " ".join((error.what, *error.evidence))
    assert fix in error.fix


def test_free_text_is_kept_verbatim() -> None:
    text = PLAYBOOK.replace("served_name: q", 'served_name: "it\'s $HOME `x` & 東京"')
    loaded = validate(parse(FILE, text), Playbook)
    assert loaded.model.served_name == "it's $HOME `x` & 東京"


def test_every_pattern_of_the_models_has_plain_words() -> None:
    for model in (InventoryFile, Playbook):
        assert not _patterns(model.model_json_schema()) - set(names.PLAIN_WORDS)


def _patterns(schema: object) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_patterns, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
    own |= set(schema.get("patternProperties", {}))
    return own.union(*(_patterns(value) for value in schema.values()))


_yamlish = st.lists(
    st.sampled_from([
        "hosts:", "a: ", "- ", "  ", "\n", "\t", "&x ", "*x", "[", "]", "{", "}", ",", "!!int ",
        '"\\ud800"', '"\\UFFFFFFFF"', "'", '"', "|", ">", "? ", ": ", "<<: ", "---", "...",
        "%YAML 9", "!",
        "#", "0x", "1e9", "\u2028", "\ufeff", "kpro5:", "gpus:", "0000:21:00.0", "~", "yes",
    ]),
    max_size=60,
).map("".join)  # fmt: skip
_bytes = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(string.printable, max_size=300).map(str.encode),
    _yamlish.map(str.encode),
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(raw=_bytes)
def test_any_bytes_give_a_document_or_a_document_error(
    parser: str, tmp_path: Path, raw: bytes
) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(raw)
    try:
        loaded = load(path)
        assert isinstance(loaded, Document)
        validate(loaded, InventoryFile)
        validate(loaded, Playbook)
    except DocumentError as error:
        assert error.what
        assert error.fix
        assert "\n" not in error.what
        error.what.encode()


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["hosts", "kpro5", "ssh", "gpus", "model", "serve", "args", "variants"])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)


@settings(max_examples=100, deadline=None)
@given(data=st.dictionaries(st.sampled_from(["hosts", "model", "serve", "variants"]), _json))
def test_any_structure_gives_a_model_or_a_document_error(data: dict[str, object]) -> None:
    for model in (InventoryFile, Playbook):
        try:
            validate(parse(FILE, yaml.safe_dump(data, allow_unicode=True)), model)
        except DocumentError as error:
            assert error.where.startswith(f"{FILE}:")
