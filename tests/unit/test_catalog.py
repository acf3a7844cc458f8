"""The inventory folder as a whole: what fits together, and what a user is told when it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deployer.catalog import Catalog
from deployer.errors import DocumentError, UsageError

INVENTORY = """\
hosts:
  kpro5:
    ssh: {address: 192.0.2.5, identity_file: keys/id, known_hosts: ~/known}
    gpus:
      - address: 0000:21:00.0
      - address: 0000:41:00.0
    containers:
      129: {ssh: {address: 192.0.2.129, identity_file: /abs/id}, gpus: ["0000:21:00.0"]}
      130: {}
    deployments:
      qwen: {container: 129, playbook: small}
      tiny: {container: 130, playbook: small, port: 30001, variant: slow}
"""
EMPTY = """\
hosts:
  bare:
    ssh: {address: 192.0.2.7}
    gpus: [{address: "0000:21:00.0"}]
"""
PLAYBOOK = """\
model: {repo: acme/tiny, path: /srv/tiny, served_name: tiny}
driver: {version: 580.126.09}
engine: {version: 0.5.11, lock: locks/lock.txt, venv: /opt/v}
variants:
  - name: fast
  - name: slow
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "a.yaml").write_text(INVENTORY)
    (tmp_path / "inventory" / "b.yml").write_text(EMPTY)
    (tmp_path / "inventory" / "notes.txt").write_text("not read")
    (tmp_path / "inventory" / ".a.yaml").write_text("an editor's file: [")
    (tmp_path / "playbooks" / "locks").mkdir(parents=True)
    (tmp_path / "playbooks" / "small.yaml").write_text(PLAYBOOK)
    (tmp_path / "playbooks" / "locks" / "lock.txt").write_text("sglang==0.5.11\n")
    return tmp_path


def load(tree: Path, *changes: tuple[str, str]) -> Catalog:
    """The catalog of `tree` after replacing text in a.yaml."""
    path = tree / "inventory" / "a.yaml"
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)
    return Catalog.load(tree / "inventory")


def ids(catalog: Catalog, *words: str, all_: bool = False) -> list[str]:
    return [deployment.id for deployment in catalog.select(list(words), all_)]


def test_select(tree: Path) -> None:
    catalog = load(tree)
    assert ids(catalog, "kpro5") == ["kpro5/qwen", "kpro5/tiny"]
    assert ids(catalog, "kpro5/tiny") == ["kpro5/tiny"]
    assert ids(catalog, "kpro5/tiny", "kpro5", "kpro5/tiny") == ["kpro5/tiny", "kpro5/qwen"]
    assert ids(catalog, all_=True) == ["kpro5/qwen", "kpro5/tiny"]


def test_a_deployment_is_joined(tree: Path) -> None:
    qwen, tiny = load(tree).select(["kpro5"])
    assert (qwen.vmid, qwen.port, qwen.gpus) == (129, 30000, ("0000:21:00.0",))
    assert qwen.variant_name == "fast"
    assert qwen.lock_text == "sglang==0.5.11\n"
    assert (tiny.port, tiny.variant_name, len(tiny.gpus)) == (30001, "slow", 2)
    assert load(tree).select(["kpro5"], variant="slow")[0].variant_name == "slow"


def test_key_files_belong_to_the_inventory_folder(tree: Path) -> None:
    host = load(tree).host("kpro5")
    assert host.ssh.identity_file == str(tree / "inventory" / "keys" / "id")
    assert host.ssh.known_hosts == str(Path("~/known").expanduser())
    assert host.containers[129].ssh is not None
    assert host.containers[129].ssh.identity_file == "/abs/id"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["kpro"], "no host `kpro` in the inventory; did you mean `kpro5`?"),
        (["kpro5/qwn"], "host `kpro5` has no deployment `qwn`; did you mean `qwen`?"),
        (["KPRO5"], "no host `KPRO5` in the inventory; did you mean `kpro5`?"),
        (["kpro5/"], "host `kpro5` has no deployment ``"),
        (["kpro5/qwen/x"], "no deployment `qwen/x`"),
        (["bare"], "host `bare` has no deployments"),
        ([], "no target named"),
        ([""], "no host ``"),
    ],
)
def test_unknown_words(tree: Path, words: list[str], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tree).select(words)
    assert what in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (["kpro5"], ["qwen", "tiny"]),
        ([" kpro5/t* ,kpro5/qwen"], ["qwen", "tiny"]),
        (["!kpro5/t*"], ["qwen"]),
        (["kpro?", "!*/qwen"], ["tiny"]),
        (["bare", "kpro5/tiny"], ["tiny"]),
    ],
)
def test_limit(tree: Path, limit: list[str], left: list[str]) -> None:
    assert [want.name for want in load(tree).select([], True, limit=limit)] == left


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        ([""], "--limit is empty"),
        ([" , "], "--limit is empty"),
        (["!"], "nothing of the inventory is like `!`"),
        (["!!kpro5"], "nothing of the inventory is like `!!kpro5`"),
        (["!kpro55"], "nothing of the inventory is like `!kpro55`; did you mean `kpro5`?"),
        (["kpro5", "KPRO6/*"], "nothing of the inventory is like `KPRO6/*`"),
        (["bare"], "--limit bare leaves nothing"),
        (["!kpro5"], "--limit !kpro5 leaves nothing"),
    ],
)
def test_a_limit_that_would_mean_something_else_is_refused(
    tree: Path, limit: list[str], what: str
) -> None:
    """A misspelt `!` pattern would let in what it was to leave out, an empty one everything."""
    with pytest.raises(UsageError) as caught:
        load(tree).select([], True, limit=limit)
    assert what in caught.value.what and caught.value.fix


def test_all_and_words_do_not_mix(tree: Path) -> None:
    with pytest.raises(UsageError, match="do not go together"):
        load(tree).select(["kpro5"], True)


def test_all_without_any_deployment(tree: Path) -> None:
    (tree / "inventory" / "a.yaml").unlink()
    with pytest.raises(UsageError, match="no host of the inventory has deployments"):
        Catalog.load(tree / "inventory").select([], True)


def test_variant_of_the_command_line(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"no variant `fats`; did you mean `fast`\?"):
        load(tree).select(["kpro5"], variant="fats")


def test_no_inventory(tree: Path) -> None:
    with pytest.raises(UsageError, match="no such inventory folder") as caught:
        Catalog.load(tree / "nowhere")
    assert "deploy help inventory" in caught.value.fix
    with pytest.raises(UsageError, match="must be a folder"):
        Catalog.load(tree / "inventory" / "a.yaml")
    (tree / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \*\.yaml file"):
        Catalog.load(tree / "empty")


def test_host_described_twice_names_both_places(tree: Path) -> None:
    (tree / "inventory" / "c.yaml").write_text(EMPTY)
    with pytest.raises(DocumentError, match="host `bare` is described twice") as caught:
        Catalog.load(tree / "inventory")
    assert caught.value.where.endswith("c.yaml:2:3")
    assert "b.yml:2:3" in caught.value.what


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        ("      130: {}", "      129: {}", (9, "129"), "duplicate key `129`; it stands at line 8"),
        (
            "0000:41:00.0",
            "0000:21:00.0",
            (6, "0000:21:00.0"),
            "0000:21:00.0 is listed twice; it stands at line",
        ),
        (
            "0000:41:00.0",
            "0000:41:00.1",
            (6, "0000:41:00.1"),
            "expected function 0 of a GPU, found 0000:41:00.1",
        ),
        (
            "container: 130",
            "container: 131",
            (12, "131"),
            "container 131, which hosts.kpro5 does not",
        ),
        (
            '["0000:21:00.0"]',
            '["0000:22:00.0"]',
            (8, '"0000:22:00.0"'),
            "host kpro5 has no GPU 0000:22:00.0; did",
        ),
        ('["0000:21:00.0"]', "[]", (8, "[]"), "is an empty list"),
        (
            "129, playbook: small",
            '129, playbook: small, gpus: ["0000:41:00.0"]',
            (11, '"0000:41:00.0"'),
            "container 129 has no GPU 0000:41:00.0",
        ),
        (
            "130, playbook: small, port: 30001",
            "130, playbook: small, gpus: ['0000:41:00.0', '0000:41:00.0']",
            (12, "'0000:41:00.0']"),
            "is listed twice",
        ),
        (
            "    ssh:",
            "    kind: plain\n    ssh:",
            (8, "containers:"),
            "is a plain host and has no containers",
        ),
    ],
)
def test_wrong_references(
    tree: Path, old: str, new: str, where: tuple[int, str], what: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        load(tree, (old, new))
    assert what in caught.value.what
    path, line, column = caught.value.where.rsplit(":", 2)
    pointed = Path(path).read_text().splitlines()[int(line) - 1][int(column) - 1 :]
    assert (int(line), pointed[: len(where[1])]) == where
    assert caught.value.fix


def test_the_traffic_moves_in_one_way(tree: Path) -> None:
    two = "cutover: {router: {url: http://r}, hook: {command: [./move]}}"
    with pytest.raises(DocumentError, match="has router and hook: the traffic moves") as caught:
        load(tree, ("playbook: small}", f"playbook: small, {two}}}"))
    assert caught.value.fix == "leave one of them"
    one = "cutover: {hook: {command: [./move]}, settle_s: 5}"
    load(tree, (two, one[:-1] + "}"))


@pytest.mark.parametrize("port", [", port: 30000", ""])
def test_two_deployments_on_one_port(tree: Path, port: str) -> None:
    catalog = load(tree, ("130, playbook: small, port: 30001", f"129, playbook: small{port}"))
    with pytest.raises(DocumentError, match="both listen on port 30000 of container 129") as caught:
        catalog.select(["kpro5/qwen"])
    assert ":12:" in caught.value.where


def test_one_port_in_two_containers_is_fine(tree: Path) -> None:
    assert len(load(tree, ("port: 30001", "port: 30000")).select(["kpro5"])) == 2


def test_equal_explicit_ports_are_seen_without_a_playbook(tree: Path) -> None:
    with pytest.raises(DocumentError, match="both listen on port 30001"):
        load(
            tree,
            ("container: 130", "container: 129"),
            ("playbook: small", "playbook: x, port: 30001"),
        )


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("playbook: small}", "playbook: smal}", "looked for {}/playbooks/smal.yaml; did you mean"),
        ("variant: slow", "variant: slwo", "has no variant `slwo`; did you mean `slow`?"),
    ],
)
def test_wrong_playbook_references(tree: Path, old: str, new: str, what: str) -> None:
    catalog = load(tree, (old, new))
    with pytest.raises(DocumentError) as caught:
        catalog.select(["kpro5"])
    assert what.format(tree) in caught.value.what
    assert "a.yaml:1" in caught.value.where


def test_a_broken_playbook_of_another_deployment_is_not_read(tree: Path) -> None:
    (tree / "playbooks" / "broken.yaml").write_text("model: [")
    catalog = load(tree, ("130, playbook: small", "130, playbook: broken"))
    assert ids(catalog, "kpro5/qwen") == ["kpro5/qwen"]
    with pytest.raises(DocumentError, match="not valid YAML"):
        catalog.select(["kpro5"])


def test_lock_missing_or_empty(tree: Path) -> None:
    lock = tree / "playbooks" / "locks" / "lock.txt"
    lock.write_text("# nothing\n")
    with pytest.raises(DocumentError, match="names no package"):
        load(tree).select(["kpro5"])
    lock.unlink()
    with pytest.raises(DocumentError, match="there is no file") as caught:
        load(tree).select(["kpro5"])
    assert "small.yaml:3:33" in caught.value.where


def test_no_playbook_folder(tree: Path) -> None:
    shutil.rmtree(tree / "playbooks")
    with pytest.raises(DocumentError, match="playbook `small` does not exist") as caught:
        load(tree).select(["kpro5"])
    assert caught.value.fix == "playbooks there: none"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("name: slow", "name: fast", "variants[1].name: fast is listed twice"),
        (
            "version: 580.126.09",
            "version: 580.126.09, install: guest",
            "there is no driver.package",
        ),
        (
            "version: 580.126.09",
            "version: 580.126.09, package: {sha256: " + "'" + "0" * 64 + "'}",
            "expected one of `url`, `file` and `local`, found none",
        ),
        ("variants:", "serve: {args: {port: 1}}\nvariants:", "expected it as serve.port"),
        (
            "variants:",
            "serve: {args: {served-model-name: x}}\nvariants:",
            "expected it as model.served_name",
        ),
        ("name: slow", "name: slow\n    args: {api-key: x}", "expected it as serve.api_key_env"),
        *(
            ("path: /srv/tiny", f"path: {path}", "model.path: expected a folder of its own")
            for path in ("/", "//", "/srv", "/etc/models", "/usr/lib/x", "/srv/../etc/x", "/proc/1")
        ),
        ("venv: /opt/v", "venv: /opt", "engine.venv: expected a folder of its own"),
        (
            "variants:",
            "download: {endpoint: 'https://me:pass@hub.example'}\nvariants:",
            "the URL has a password",
        ),
        ("variants:", "serve: {args: {admin-api-key: x}}\nvariants:", "a secret may not stand"),
        *(
            ("variants:", f"download: {{{text}}}\nvariants:", what)
            for text, what in [
                ("proxy: 'http://me:pass@p:1'", "the URL has a password"),
                ("mirrors: ['https://a:b@m']", "the URL has a password"),
                (
                    "mirrors: ['hf-mirror.com']",
                    "download.mirrors[0]: expected a URL like https://hub.example, found hf-",
                ),
                ("mirrors: ['https://m', 'https://m']", "https://m is listed twice"),
                ("mirrors: ['https://m/?a=b']", "found a query or a fragment"),
                ("mirrors: ['https://m:99999']", "Port out of range"),
                ("endpoint: 'ftp://hub'", "download.endpoint: expected a URL"),
                (
                    "proxy: 'https://p:1'",
                    "download.proxy: expected a URL like http://proxy.example:3128",
                ),
                ("methods: []", "download.methods: expected at least 1 entry"),
                ("methods: [range, range]", "range is listed twice"),
                ("methods: [hf]", "expected range, hf-xet, mirror or peer, found"),
                ("methods: [mirror, peer]", "none of mirror, peer can be used"),
                ("max_stalls: 5", "unknown key `max_stalls` in download"),
                ("peer: {address: a, path: srv/x}", "expected an absolute path like /srv/models"),
                ("peer: {address: a, path: /srv/../x}", "expected a path without `..`"),
                (
                    "peer: {address: '-oProxyCommand=x', path: /x}",
                    "expected a host name or an IP address",
                ),
                ("peer: {path: /x}", "the key `address` is missing in download.peer"),
                ("peer: {address: a, path: /x, port: 0}", "expected a port number"),
                ("peer: {address: a, path: /x, user: 'a b'}", "expected a user name like root"),
                ("floor_bytes_per_s: -1", "expected a number of at least 0"),
            ]
        ),
    ],
)
def test_wrong_playbooks(tree: Path, old: str, new: str, what: str) -> None:
    path = tree / "playbooks" / "small.yaml"
    path.write_text(PLAYBOOK.replace(old, new, 1))
    with pytest.raises(DocumentError) as caught:
        load(tree).select(["kpro5"])
    assert what in caught.value.what
    assert "small.yaml:" in caught.value.where


def test_relative_inventory_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "inventory")
    for folder in (Path(), Path("../inventory")):
        assert ids(Catalog.load(folder), "kpro5/qwen") == ["kpro5/qwen"]
    monkeypatch.chdir(tree)
    Path("inventory/a.yaml").write_text("hosts: 1\n")
    with pytest.raises(DocumentError) as caught:
        Catalog.load(Path("inventory"))
    assert caught.value.where == "inventory/a.yaml:1:8"
