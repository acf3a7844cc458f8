"""What the keys of a server of several nodes say about each other. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence

from deployer.crosscheck_twin import refuse_twin
from deployer.deployment import Deployment
from deployer.document import Document
from deployer.errors import UsageError
from deployer.playbook import DIST_PORTS, NODE_FLAGS, ArgValue, Playbook
from deployer.yamltree import At

TP = ("tp-size", "tensor-parallel-size", "tp")
PP = ("pp-size", "pipeline-parallel-size", "pp")
DP = ("dp-size", "data-parallel-size", "dp")


def check_nodes(document: Document, playbook: Playbook, nodes: Sequence[str]) -> None:
    """At least two hosts, each once; arguments that so many can share."""
    at: At = ("nodes",)
    if len(nodes) < 2:
        raise document.error(
            at,
            f"nodes: expected at least two hosts, found {len(nodes)}",
            fix="leave the key out for a model that one host serves",
            key=True,
        )
    for index in range(len(nodes)):
        refuse_twin(document, at, nodes, index, (*at, index))
    groups: list[tuple[At, dict[str, ArgValue]]] = [(("serve", "args"), playbook.serve.args)]
    groups += [
        (("variants", index, "args"), one.args) for index, one in enumerate(playbook.variants)
    ]
    for place, args in groups:
        for flag in args:
            if flag in NODE_FLAGS:
                raise document.error(
                    (*place, flag),
                    f"{document.name((*place, flag))}: `nodes` sets it",
                    fix="leave it out; the port is serve.dist_port",
                    key=True,
                )
        merged = {**playbook.serve.args, **args}
        given = {flag: value for flag, value in merged.items() if value is not False}
        _check_shares(document, place, given, len(nodes))
    _check_dist_port(document, ("serve", "dist_port"), playbook, playbook.serve.port)


def _check_dist_port(document: Document, at: At, playbook: Playbook, port: int) -> None:
    first = playbook.serve.dist_port
    if first <= port < first + DIST_PORTS:
        raise document.error(
            at,
            f"port {port} of the server is one of {first} to {first + DIST_PORTS - 1}, which the "
            "nodes use among themselves",
            fix="choose another serve.dist_port",
        )


def _check_shares(document: Document, place: At, args: Mapping[str, ArgValue], nodes: int) -> None:
    """As `check_server_args` and the ranks of a node in SGLang 0.5.11 ask for."""
    tp, pp, dp = (_count(args, names) for names in (TP, PP, DP))
    if tp is not None and pp is not None and ranks_of_a_node(tp, pp, nodes) is None:
        words = f"tp-size x pp-size is {tp * pp}" if pp == 1 or tp * pp % nodes else ""
        raise document.error(
            place,
            f"{words or f'tp-size is {tp} and pp-size {pp}'}, which {nodes} nodes cannot share",
            fix=f"choose a multiple of {nodes}"
            if words
            else f"choose a pp-size that divides {nodes}, or is a multiple of it",
            key=True,
        )
    if dp is not None and dp > 1 and not args.get("enable-dp-attention"):
        raise document.error(
            place,
            f"dp-size is {dp}: SGLang shares it among nodes with enable-dp-attention alone",
            fix="set enable-dp-attention: true, or serve replicas (`deploy help inventory`)",
            key=True,
        )


def ranks_of_a_node(tp: int, pp: int, nodes: int) -> int | None:
    """How many ranks, of a GPU each, run on each node; None when they do not come out even.

    As in SGLang 0.5.11, entrypoints/engine.py: a node has whole pipeline stages, or a part of one.
    """
    if tp < 1 or pp < 1:
        return None
    stages, nodes_a_stage = max(pp // nodes, 1), max(nodes // pp, 1)
    ranks = stages * (tp // nodes_a_stage)
    return ranks if ranks and ranks * nodes == tp * pp and tp % nodes_a_stage == 0 else None


def _count(args: Mapping[str, ArgValue], names: Sequence[str]) -> int | None:
    """1 without the flag; None when it is no number, which the server's own parser tells."""
    value = next((args[name] for name in names if name in args), 1)
    return None if isinstance(value, bool) or not str(value).isdigit() else int(value)


def check_node(deployment: Deployment, document: Document) -> None:
    """What a node's own entry may not say. Raises DocumentError."""
    at: At = ("hosts", deployment.host_name, "deployments", deployment.name)
    entry = deployment.entry
    for key, value in (("replica", entry.replica), ("cutover", entry.cutover)):
        if value is not None:
            raise document.error(
                (*at, key),
                f"{document.name((*at, key))}: {deployment.id} is one of the nodes of playbook "
                f"{deployment.playbook_name}, which are no replicas and do not migrate",
                fix=f"leave `{key}:` out",
                key=True,
            )
    if entry.port is not None:
        _check_dist_port(document, (*at, "port"), deployment.playbook, entry.port)
    if entry.node_address is not None:
        _check_address(document, (*at, "node_address"), entry.node_address)
    _check_gpus(document, at, deployment)


def _check_address(document: Document, at: At, text: str) -> None:
    """One that another machine can use, without a port."""
    bare = text.strip("[]")
    problem = ""
    try:
        if ipaddress.ip_address(bare.partition("%")[0]).is_unspecified:
            problem = "is none that another machine can reach"
        elif "%" in bare:
            problem = "has a zone, which another machine does not know"
    except ValueError:
        problem = "is no address: a port has no place in it" if ":" in bare else ""
    if problem:
        raise document.error(
            at,
            f"{document.name(at)}: {text} {problem}",
            fix="write the address alone; the port is serve.dist_port of the playbook",
        )


def _check_gpus(document: Document, at: At, deployment: Deployment) -> None:
    """Enough for its ranks, unless the arguments choose GPUs by themselves."""
    args, node = deployment.serve_args(), deployment.node
    tp, pp = _count(args, TP), _count(args, PP)
    if node is None or tp is None or pp is None or {"base-gpu-id", "gpu-id-step"} & set(args):
        return
    needed, has = ranks_of_a_node(tp, pp, len(node.hosts)), len(deployment.gpus)
    if needed is not None and has < needed:
        raise document.error(
            at,
            f"{deployment.id} has {has} GPU{'s' if has != 1 else ''}, and {needed} of the "
            f"{tp * pp} ranks run on each of the {len(node.hosts)} nodes",
            fix=f"give it {needed} GPUs, or lower tp-size (variant {deployment.variant_name})",
            key=True,
        )


def refuse_nodes(deployments: Iterable[Deployment], what: str) -> None:
    """Raises UsageError when one of them is a node of a server, which `what` cannot do."""
    for want in deployments:
        if want.node is not None:
            raise UsageError(
                f"{what} is not for a server of several nodes, and {want.id} is one of them",
                fix=f"`deploy down {want.id}`; write the other hosts into the inventory and "
                "`nodes:` of the playbook; then `deploy up`",
            )
