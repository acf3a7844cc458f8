"""Going back with all nodes: where to, what served before, what a failure leaves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from nodesworld import ALONE, HOSTS, PLAIN, RANKS, serving
from serverworld import IDENTITY, MANIFEST, fact, facts, server_job, state

from deployer.deployment import Deployment, Node
from deployer.errors import GateFailed, StepBlocked, Unreachable
from deployer.kept import Kept
from deployer.model import Facts, PlanState
from deployer.multinode_back import NodesBack
from deployer.multinode_node import node_steps
from deployer.multinode_told import Failed
from deployer.recipe import recipe_of
from deployer.restart import restart_steps
from deployer.rollback import RollBack, then
from deployer.rollback_choice import unfit
from deployer.sglang.argv import command, server_argv
from deployer.state import DeploymentState, Launch, RolledBack
from deployer.steps.launch import LaunchStep
from deployer.steps.rolled_back import wish_key
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import Rung
from deployer.steps.stop import StopStep
from deployer.up_options import UpOptions


class Going:
    """A node as NodesBack.seen and failed look at it."""

    def __init__(self, want: Deployment, own: DeploymentState, seen: Facts) -> None:
        self.want, self.host, self.own, self.facts = want, want.host_name, own, seen
        self.saved = 0

    def save(self) -> None:
        self.saved += 1


def going_back(tmp_path: Path, *seen: Facts) -> tuple[NodesBack, list[Any]]:
    """Both have a launch `old` of variant no-mtp to go to, and what `seen` shows alive."""
    kept, parts, nodes = Kept(tmp_path / "kept"), [], list[Any]()
    for now, look in zip(RANKS, seen, strict=True):
        old = dataclasses.replace(now, variant="no-mtp")
        recipe = recipe_of(old, MANIFEST)
        argv = command(old, server_argv(old))
        part = Launch(
            id="old",
            variant="no-mtp",
            started=1.0,
            argv=argv,
            recipe=kept.add(recipe, old.lock_text),
            fingerprint=Rung("no-mtp").fingerprint(old, MANIFEST),
        )
        own = state()
        own.launches.append(part)
        parts.append(RollBack(now, part, recipe, kept, lambda: 7.0))
        nodes.append(Going(then(now, recipe, old.lock_text, part), own, look))
    back = NodesBack(parts)
    back.begin(nodes)
    return back, nodes


@pytest.mark.parametrize(
    ("mine", "theirs", "left"),
    [
        (serving(RANKS[0]), serving(RANKS[1]), IDENTITY.id),
        (serving(RANKS[0]), facts(fact()), ""),
        (serving(RANKS[0]), serving(RANKS[1], "x"), ""),
        (facts(fact()), facts(fact()), ""),
    ],
)
def test_what_served_before_is_one_launch_of_all(
    tmp_path: Path, mine: Facts, theirs: Facts, left: str
) -> None:
    back, nodes = going_back(tmp_path, mine, theirs)
    back.seen(nodes)
    assert [node.own.rollback.left for node in nodes] == [left, left]
    assert [node.own.rollback.mark for node in nodes] == [
        node.own.launches[0].fingerprint for node in nodes
    ], "the same command, rank and meeting place"
    # Killed, and the old launch is gone by half: what served before stays known.
    nodes[0].facts = facts(fact())
    back.seen(nodes)
    assert nodes[1].own.rollback.left == left
    # Rank 1 has begun the launch that is gone back to: that is none of before.
    job = server_job(nodes[1].want, "no-mtp", mark=nodes[1].own.rollback.mark)
    nodes[0].facts = nodes[1].facts = facts(fact(job=job))
    back.seen(nodes)
    assert nodes[0].own.rollback.left == left
    back.done(nodes)
    assert [(node.own.rollback.outcome, node.saved) for node in nodes] == [("done", 1)] * 2


def test_a_failed_rollback_of_nodes_tells_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, nodes = going_back(tmp_path, serving(RANKS[0]), serving(RANKS[1]))
    back.seen(nodes)
    options = UpOptions(base=tmp_path / "inventory")
    dark = Unreachable("dark", fix="look")
    back.failed(nodes, options, Failed({"kpro6": dark}))
    assert dark.fix == "look; `deploy rollback kpro5/qwen old` goes on"
    # No record of what served is left: nothing is guessed.
    gate = GateFailed("it repeats itself", fix="x")
    back.failed(nodes, options, Failed({"kpro5": gate}))
    assert f"launch {IDENTITY.id} is not in the state file of kpro5" in gate.what
    assert "`deploy up kpro5/qwen` launches the playbook" in gate.fix
    assert nodes[0].own.rollback.outcome == ""
    monkeypatch.setattr(NodesBack, "_back", lambda *words: "it serves again")
    gate = GateFailed("it repeats itself", fix="x")
    back.failed(nodes, options, Failed({"kpro5": gate}))
    assert (gate.what, gate.fix) == ("it repeats itself; it serves again", "x")


def test_another_place_is_no_place_to_go_back_to(tmp_path: Path) -> None:
    """Nodes were added, taken away or put in another order since; or one of them forgot it."""
    _, nodes = going_back(tmp_path, facts(), facts())
    places = [(want, node.own) for want, node in zip(RANKS, nodes, strict=True)]
    assert unfit(places, "old") == ""
    assert "kpro6/qwen has no record" in unfit([places[0], (RANKS[1], state())], "old")
    turned = [(places[1][0], places[0][1]), (places[0][0], places[1][1])]
    assert "was rank 0 of 2 nodes then, and is rank 1 of 2 nodes now" in unfit(turned, "old")
    part = nodes[0].own.launches[0]
    recipe = recipe_of(nodes[0].want, MANIFEST)
    with pytest.raises(StepBlocked, match=r"was rank 0 of 2 nodes, and .* is a server of its own"):
        then(PLAIN, recipe, "", part)
    alone = part.model_copy(update={"argv": ALONE})
    with pytest.raises(StepBlocked, match=r"was a server of its own, and .* is rank 0 of 2 nodes"):
        then(RANKS[0], recipe, "", alone)
    # Where they meet: at the address of now, at the port of then.
    moved = dataclasses.replace(RANKS[0], node=Node(0, HOSTS, "198.51.100.7:20100"))
    made = then(moved, recipe, "", part)
    assert made.serve_args()["dist-init-addr"] == "198.51.100.7:20000"


def test_a_restart_does_not_undo_a_rollback_of_nodes() -> None:
    steps, stop, _ = node_steps(restart_steps())
    assert stop.restarts and stop in steps
    assert not node_steps([StopStep(), LaunchStep()])[1].restarts
    own = state()
    own.rollback = RolledBack(
        to="old", mark="m", left="", wish=wish_key(RANKS[1]), commits=["c0ffee"], when=5.0
    )
    own.rollback.outcome = "done"
    seen = serving(RANKS[1])
    other = dataclasses.replace(seen.need(ServerFact).job, fingerprint="m")  # type: ignore[type-var]
    plan = stop.plan(RANKS[1], facts(fact(job=other)), own)
    assert plan.state is PlanState.BLOCKED and plan.stands, plan.reason
