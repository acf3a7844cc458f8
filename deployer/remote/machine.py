"""What tells a machine from all others, whatever address it is reached at.

The boot id is one for all containers of a kernel, and the machine id is often that of an image. So
the folder that holds the host lock is asked as well: whoever shares it, shares the lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployer.model import Probe, ProbeOutput, Where
from deployer.remote.lock_scripts import LOCK
from deployer.shell import quote

FOLDER = LOCK.rpartition("/")[0]
ABOVE = FOLDER.rpartition("/")[0]


@dataclass(frozen=True)
class Machine:
    """`folder` and `above` are device:inode of the lock's folder and of the one it lies in.

    '' where it could not be read; there is no folder before the first run that changes something.
    """

    boot: str = ""
    folder: str = ""
    above: str = ""

    def same_as(self, other: Machine) -> bool:
        """Are both surely one machine?"""
        if not self.boot or self.boot != other.boot:
            return False
        if self.folder and other.folder:
            return self.folder == other.folder
        return bool(self.above) and self.above == other.above


def parse(output: ProbeOutput) -> Machine:
    """The answer of PROBE."""
    rows = dict(line.partition(" ")[::2] for line in output.text.splitlines())
    return Machine(rows.get("boot", ""), rows.get(FOLDER, ""), rows.get(ABOVE, ""))


PROBE = Probe(
    "machine",
    Where.HOST,
    'boot=; { read -r boot </proc/sys/kernel/random/boot_id; } 2>/dev/null; echo "boot $boot"\n'
    f"stat -c '%n %d:%i' {quote(FOLDER)} {quote(ABOVE)} 2>/dev/null || :\n",
    parse,
)
