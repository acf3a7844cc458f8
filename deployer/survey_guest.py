"""Which GPUs a container's configuration names. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deployer.pct_config import mounted_devices
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.gpus_facts import PciFunction

_NODE = r"/dev/nvidia[0-9]{1,3}"


def gpu_nodes(seen: ContainerFacts) -> tuple[str, ...]:
    """The /dev/nvidiaN that it gets at its next start, in order."""
    section = seen.config().after_restart()
    paths = [entry.path for entry in section.devices().values()]
    paths += mounted_devices(section)
    return tuple(dict.fromkeys(path for path in paths if re.fullmatch(_NODE, path)))


def gpus_of(seen: ContainerFacts, functions: Sequence[PciFunction]) -> tuple[str, ...]:
    """Addresses whose /dev/nvidiaN it gets; () when the N of the GPUs are not known now."""
    nodes = gpu_nodes(seen)
    return tuple(one.address for one in functions if f"/dev/nvidia{one.minor}" in nodes)
