"""What the keys of a server of several nodes say about each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deployer.crosscheck_twin import refuse_twin
from deployer.deployment import Deployment
from deployer.document import Document
from deployer.errors import UsageError
from deployer.playbook import DIST_PORTS, NODE_FLAGS, ArgValue, Playbook
from deployer.yamltree import At


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
        # As ServerArgs.check_server_args asks for, SGLang 0.5.11.
        size = _size({**playbook.serve.args, **args})
        if size is not None and size % len(nodes):
            raise document.error(
                place,
                f"tp-size x pp-size is {size}, which {len(nodes)} nodes cannot share",
                fix=f"choose a multiple of {len(nodes)}",
                key=True,
            )
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


def _size(args: Mapping[str, ArgValue]) -> int | None:
    """tp-size x pp-size; None when they are no numbers, which the server's own parser tells."""
    found = 1
    for names in (("tp-size", "tp", "tensor-parallel-size"), ("pp-size", "pipeline-parallel-size")):
        value = next((args[name] for name in names if name in args), 1)
        if isinstance(value, bool) or not str(value).isdigit():
            return None
        found *= int(value)
    return found


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


def refuse_nodes(deployments: Iterable[Deployment], what: str) -> None:
    """Raises UsageError when one of them is a node of a server, which `what` cannot do."""
    for want in deployments:
        if want.node is not None:
            raise UsageError(
                f"{what} is not for a server of several nodes, and {want.id} is one of them",
                fix=f"`deploy down {want.id}`; write the other hosts into the inventory and "
                "`nodes:` of the playbook; then `deploy up`",
            )
