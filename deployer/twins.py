"""Two names of the inventory for one machine: told before the second name changes it.

What is written down is compared when the inventory is loaded (`crosscheck_machines`). The rest is
found here, by what the machines themselves say, among the hosts of one run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from deployer.crosscheck_machines import ONCE, claimed_twice
from deployer.errors import DocumentError
from deployer.inventory import Host
from deployer.names import listed
from deployer.remote.machine import Machine


class Twins:
    """The machines that a run has met. Asked by every host's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[str, tuple[Host, Machine]] = {}
        self._told: set[str] = set()

    def meet(
        self, name: str, host: Host, machine: Machine | None, tell: Callable[[str], None]
    ) -> None:
        """`tell` gets one line when `name` is a machine that was met under another name.

        Raises DocumentError when both names claim a GPU, a container or a port of it.
        """
        if machine is None:
            return
        with self._lock:
            others = {
                other: theirs
                for other, (theirs, seen) in self._met.items()
                if other != name and machine.same_as(seen)
            }
            for other, theirs in others.items():
                if claimed := claimed_twice(theirs, host):
                    raise DocumentError(
                        f"{other} and {name} are one machine, and both claim {listed(claimed)}",
                        where=name,
                        fix=ONCE,
                    )
            self._met[name] = host, machine
            new = bool(others) and name not in self._told
            self._told.add(name)
        if new:
            tell(f"{name} is the same machine as {listed(others)}; {ONCE}")
