"""Which GPUs a container's configuration names. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deployer.pct_config import mounted_devices
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.gpus_facts import PciFunction


def gpus_of(seen: ContainerFacts, functions: Sequence[PciFunction]) -> tuple[str, ...]:
    """Addresses whose /dev/nvidiaN it gets; () when the N of the GPUs are not known now."""
    section = seen.config().after_restart()
    paths = [entry.path for entry in section.devices().values()]
    paths += mounted_devices(section)
    matches = [re.search(r"^/dev/nvidia([0-9]{1,3})$", path) for path in paths]
    minors = {int(found.group(1)) for found in matches if found}
    return tuple(one.address for one in functions if one.minor in minors)
