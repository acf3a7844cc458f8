"""`nodes` of a playbook and what inventory and words say of it: what is meant, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from serverworld import MANIFEST, state

from deployer import kept_wish
from deployer.catalog import Catalog
from deployer.cli.options import Options
from deployer.cli.up import _by_server, _units
from deployer.crosscheck_nodes import ranks_of_a_node, refuse_nodes
from deployer.deployment import Deployment
from deployer.errors import DocumentError, UsageError
from deployer.fleet import by_host
from deployer.kept import Kept
from deployer.recipe import recipe_of
from deployer.sglang.argv import command, server_argv
from deployer.state import HostState, Launch
from deployer.state_file import StateFile

INVENTORY = """\
hosts:
  kpro5:
    ssh: {address: 192.0.2.5}
    gpus: [{address: "0000:21:00.0"}, {address: "0000:41:00.0"}]
    containers: {129: {ssh: {address: 192.0.2.129}}}
    deployments:
      big: {container: 129, playbook: big}
  kpro6:
    ssh: {address: 192.0.2.6}
    gpus: [{address: "0000:21:00.0"}, {address: "0000:41:00.0"}]
    deployments:
      big: {playbook: big}
      own: {playbook: own}
"""


PLAYBOOK = """\
model: {repo: acme/big, path: /srv/big, served_name: big}
driver: {version: 580.126.09}
engine: {version: 0.5.11, lock: lock.txt, venv: /opt/v}
serve: {port: 30100, args: {tp-size: 4}}
variants: [{name: fast}, {name: slow}]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "inventory" / "a.yaml").write_text(INVENTORY)
    (tmp_path / "playbooks" / "big.yaml").write_text(f"nodes: [kpro6, kpro5]\n{PLAYBOOK}")
    (tmp_path / "playbooks" / "own.yaml").write_text(PLAYBOOK.replace("30100", "30200"))
    (tmp_path / "playbooks" / "lock.txt").write_text("sglang==0.5.11\n")
    return tmp_path


def select(tree: Path, *words: str, **more: Any) -> list[Deployment]:
    return Catalog.load(tree / "inventory").select(list(words), **more)


def replaced(tree: Path, name: str, old: str, new: str) -> None:
    path = tree / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_one_node_means_all_in_rank_order(tree: Path) -> None:
    for word in ("kpro5", "kpro5/big", "kpro6/big"):
        assert [want.id for want in select(tree, word)] == ["kpro6/big", "kpro5/big"]
    alone, servers = _by_server(select(tree, "kpro6"))
    assert [want.id for want in alone] == ["kpro6/own"]
    assert [[want.id for want in one] for one in servers] == [["kpro6/big", "kpro5/big"]]
    assert [want.id for want in select(tree, "kpro5/big", whole=False)] == ["kpro5/big"]
    with pytest.raises(UsageError, match="without kpro5/big"):
        select(tree, all_=True, limit=["!kpro5"])
    with pytest.raises(UsageError, match="migrate is not for a server of several nodes") as caught:
        refuse_nodes(select(tree, "kpro5/big"), "migrate")
    assert "`deploy down kpro6/big`" in caught.value.fix
    refuse_nodes(select(tree, "kpro6/own"), "migrate")


def test_a_server_waits_for_its_own_hosts_alone(tree: Path) -> None:
    alone, servers = _by_server(select(tree, "kpro6"))
    units, after = _units(by_host(alone), servers)
    assert {name: [w.id for w in wants] for name, wants in units.items()} == {
        "kpro6": ["kpro6/own"],
        "kpro6+kpro5/big": ["kpro6/big", "kpro5/big"],
    }
    assert after == {"kpro6+kpro5/big": ["kpro6"]}
    other = [dataclasses.replace(want, host_name=f"x{want.host_name}") for want in servers[0]]
    _, after = _units(by_host(alone), [*servers, other, servers[0]])
    assert list(after.values())[1] == [], "other hosts: nothing to wait for"


def test_each_node_is_told_its_place(tree: Path) -> None:
    first, second = select(tree, "kpro5/big")
    assert (first.follows, second.follows) == (False, True)
    flags = "--nnodes 2 --node-rank {} --dist-init-addr 192.0.2.6:20000"
    for rank, want in enumerate((first, second)):
        assert flags.format(rank) in " ".join(server_argv(want))
    replaced(
        tree, "inventory/a.yaml", "{playbook: big}", "{playbook: big, node_address: 'fd00::6'}"
    )
    assert select(tree, "kpro5")[0].serve_args()["dist-init-addr"] == "[fd00::6]:20000"
    [own] = select(tree, "kpro6/own")
    assert own.node is None and "nnodes" not in own.serve_args()


@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("playbooks/big.yaml", "[kpro6, kpro5]", "[kpro5]", "expected at least two hosts, found 1"),
        ("playbooks/big.yaml", "[kpro6, kpro5]", "[kpro5, kpro5]", "kpro5 is listed twice"),
        ("playbooks/big.yaml", "[kpro6, kpro5]", "[kpro5, kpro7]", "no host `kpro7`"),
        ("playbooks/big.yaml", "tp-size: 4", "tp-size: 3", "is 3, which 2 nodes cannot share"),
        ("playbooks/big.yaml", "name: slow", "name: slow, args: {tp-size: 5}", "is 5, which"),
        ("playbooks/big.yaml", "tp-size: 4", "tp: 1", "is 1, which 2 nodes cannot share"),
        (
            "playbooks/big.yaml",
            "tp-size: 4",
            "tp-size: 2, pp-size: 3",
            "tp-size is 2 and pp-size 3, which 2 nodes cannot share",
        ),
        ("playbooks/big.yaml", "tp-size: 4", "tp-size: 4, dp-size: 2", "with enable-dp-attention"),
        (
            "inventory/a.yaml",
            ', {address: "0000:41:00.0"}',
            "",
            "kpro5/big has 1 GPU, and 2 of the 4 ranks run on each of the 2 nodes",
        ),
        ("playbooks/big.yaml", "name: slow", "name: slow, args: {tp-size: false}", "is 1, which"),
        ("playbooks/big.yaml", "tp-size: 4", "tp-size: 4, pp-size: 0", "and pp-size 0, which"),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, node_address: '192.0.2.6:20000'}",
            "node_address: 192.0.2.6:20000 is no address: a port has no place in it",
        ),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, node_address: '[::]'}",
            "is none that another machine can reach",
        ),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, node_address: 'fe80::1%eth0'}",
            "has a zone",
        ),
        ("playbooks/big.yaml", "tp-size: 4", "nnodes: 2", "serve.args.nnodes: `nodes` sets it"),
        (
            "playbooks/big.yaml",
            "name: slow",
            "name: slow, args: {nccl-init-addr: 'a:1'}",
            "`nodes` sets it",
        ),
        ("playbooks/big.yaml", "30100", "20003", "port 20003 of the server is one of 20000 to"),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, port: 20005}",
            "port 20005 of the server is one of",
        ),
        ("inventory/a.yaml", "      big: {playbook: big}\n", "", "`kpro6` has no deployment `big`"),
        ("inventory/a.yaml", "{playbook: big}", "{playbook: own}", "`kpro6` has no deployment"),
        ("inventory/a.yaml", "{playbook: big}", "{playbook: big, variant: slow}", "two variants"),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, replica: {router: {url: 'http://r'}}}",
            "which are no replicas",
        ),
        ("inventory/a.yaml", "own: {playbook: own}", "own: {playbook: big}", "no deployment `own`"),
    ],
)
def test_what_does_not_fit(tree: Path, file: str, old: str, new: str, what: str) -> None:
    replaced(tree, file, old, new)
    with pytest.raises(DocumentError) as caught:
        select(tree, "kpro5", "kpro6")
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("tp", "pp", "nodes", "ranks"),
    [
        (4, 1, 2, 2),
        (4, 2, 2, 4),
        (2, 4, 2, 4),
        (8, 2, 4, 4),
        (1, 2, 2, 1),
        (1, 1, 2, None),
        (2, 3, 2, None),
        (3, 2, 4, None),
        (2, 2, 3, None),
        (6, 1, 4, None),
    ],
)
def test_ranks_come_out_even_or_not(tp: int, pp: int, nodes: int, ranks: int | None) -> None:
    assert ranks_of_a_node(tp, pp, nodes) == ranks


def test_a_host_that_is_no_node(tree: Path) -> None:
    replaced(
        tree,
        "inventory/a.yaml",
        "hosts:\n",
        "hosts:\n  kpro4:\n    ssh: {address: a}\n"
        "    gpus: [{address: '0000:21:00.0'}]\n    deployments: {big: {playbook: big}}\n",
    )
    with pytest.raises(DocumentError, match="is for the nodes kpro6, kpro5"):
        select(tree, "kpro4")


def test_a_container_behind_pct_has_no_known_address(tree: Path) -> None:
    replaced(tree, "playbooks/big.yaml", "[kpro6, kpro5]", "[kpro5, kpro6]")
    replaced(tree, "inventory/a.yaml", "129: {ssh: {address: 192.0.2.129}}", "129: {}")
    with pytest.raises(DocumentError, match="how the others reach its container is not known"):
        select(tree, "kpro5")
    replaced(tree, "inventory/a.yaml", "container: 129,", "container: 129, node_address: ct,")
    assert select(tree, "kpro5")[1].serve_args()["dist-init-addr"] == "ct:20000"


def test_a_look_may_leave_one_node_out(tree: Path) -> None:
    options = Options(tree / "inventory", False, False, False, False, None, limit=("kpro5",))
    assert [want.id for want in options.select((), True, looks=True)] == ["kpro5/big"]
    with pytest.raises(UsageError, match="without kpro6/big"):
        options.select((), True)


def test_a_playbook_that_cannot_be_read_leaves_the_nodes_known(tree: Path) -> None:
    first, second = select(tree, "kpro5/big")
    kept, told = Kept(tree / ".deploy" / "kept"), list[str]()
    for want in (first, second):
        own = state()
        recipe = kept.add(recipe_of(want, MANIFEST), want.lock_text)
        argv = command(want, server_argv(want))
        own.launches = [Launch(id="a", variant="fast", started=1.0, argv=argv, recipe=recipe)]
        StateFile(tree / ".deploy" / "state", want.host_name).save(
            HostState(host=want.host_name, deployments={"big": own})
        )
    (tree / "playbooks" / "big.yaml").write_text("nodes: [")
    found = kept_wish.select(
        Catalog.load(tree / "inventory"), "kpro5/big", tree / ".deploy", told.append
    )
    assert [want.id for want in found] == ["kpro6/big", "kpro5/big"]
    assert [want.node and want.node.rank for want in found] == [0, 1] and len(told) == 1
