"""Which test files drive which host of the container lab, and which files take longest.

`tests/run.sh` runs three processes. Files of one host go one after another in one process; the two
hosts go side by side, each with the hub's faults of its own (`lab.sh fault NAME on HOST`). A file
that needs both names both: it waits until the other process has none of them in use.
"""

from __future__ import annotations

BOTH = ("kpro5", "kpro6")
HOSTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("driver", "lab", "rollback_lab", "story", "up_faults", "up_path"), ("kpro5",)),
    **dict.fromkeys(("hostile_values", "kill", "locks"), ("kpro6",)),
    **dict.fromkeys(("gc_lab", "init"), ("kpro5",)),
    "migrate_lab": BOTH,
    "migrate_odd_lab": BOTH,
}
"""tests/container/test_NAME.py -> its hosts."""

LONGEST = (
    *("container/test_many", "container/test_download_kills", "container/test_takeover"),
    *("container/test_fault_table", "container/test_fetch_methods"),
    *("scripts/test_gates_fallback", "container/test_download_ways"),
    *("container/test_download_bad_input", "scripts/test_replay", "container/test_fetch_pool"),
    *("scripts/test_stop", "container/test_download", "container/test_hub_clients"),
    *("scripts/test_gates_lookalike", "container/test_transport_contract"),
    *("container/test_download_ssh", "scripts/test_lookalike_faults"),
)
"""Files of 15 s and more, outside the lab, longest first: begun last they would end alone."""


def name_of(nodeid: str) -> str:
    """`container/test_lab` of a test's id."""
    path = nodeid.partition("::")[0]
    return path.removeprefix("tests/").removesuffix(".py")


def hosts_of(nodeid: str) -> tuple[str, ...]:
    """The lab's hosts that a test's file drives; () for none."""
    return HOSTS.get(name_of(nodeid).removeprefix("container/test_"), ())


def unit_of(nodeid: str) -> str:
    """What goes to one process together: the files of one host, those of the VM lab, or a file."""
    name = name_of(nodeid)
    if hosts := hosts_of(nodeid):
        return f"lab {hosts[0]}"
    return "vmlab" if name.startswith("vmlab/") else name


def rank(nodeid: str) -> tuple[int, int, str]:
    """Sorts tests: the lab first, then the VM lab, then the longest, then the others by folder.

    Ranks of tests of one file are equal: sorting keeps their order.
    """
    name, hosts = name_of(nodeid), hosts_of(nodeid)
    folder = name.partition("/")[0]
    if hosts:
        return 0, BOTH.index(hosts[0]) * 2 + len(hosts), name
    if folder == "vmlab":
        return 1, int(name == "vmlab/test_reboot"), name
    if name in LONGEST:
        return 2, LONGEST.index(name), name
    folders = ("container", "scripts", "corpus", "unit")
    return 3, folders.index(folder) if folder in folders else len(folders), name
