"""Of how many nodes a server is one, and which: by a launch, and by the deployment. Pure."""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.state import Launch


def place_of(launch: Launch) -> tuple[int, int]:
    """Of how many nodes it was one, and its rank; (1, 0) of a server of its own."""
    flags = dict(zip(launch.argv, launch.argv[1:], strict=False))
    count, rank = flags.get("--nnodes", ""), flags.get("--node-rank", "")
    return (int(count) if count.isdigit() else 1), (int(rank) if rank.isdigit() else 0)


def placed(now: Deployment) -> tuple[int, int]:
    """The same of the deployment as it is now."""
    return (1, 0) if now.node is None else (len(now.node.hosts), now.node.rank)


def place_words(place: tuple[int, int]) -> str:
    """`rank 1 of 2 nodes`."""
    count, rank = place
    return "a server of its own" if count == 1 else f"rank {rank} of {count} nodes"
