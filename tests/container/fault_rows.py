"""The faults of the download, row by row: what the hub does, and how the step must end.

The names are those of the project's fault table (a1 .. l, gated); `-SOMETHING` is a variant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHARDS = 6
SHARD_MB = 32.0
"""One block of 256 KiB a connection is 0.5 % of the repository."""

BPS = 12_000_000.0
"""Bytes a second a connection: a cut comes in the middle of a transfer, buffers stay short."""

SHARD = "00002-of"
MIB = 1 << 20
Fault = dict[str, Any]


def cdn(do: str, **more: Any) -> Fault:
    """A fault of the CDN on one shard, half-way through the file."""
    where: Fault = {"where": "cdn", "match": SHARD, "do": do}
    if do not in ("status", "hang", "norange") and "after" not in more:
        where["at"] = 0.52
    return {**where, **more}


def hub(do: str, match: str, **more: Any) -> Fault:
    """A fault of the hub itself."""
    return {"where": "hub", "match": match, "do": do, **more}


@dataclass(frozen=True)
class Row:
    """One fault. `error`, `says`, `code`: how the first run ends when it does not end verified.

    `code` is the agent's exit code (0: it did not run or did not fail), `exit` the command's.
    After such an end the faults are lifted and a second run must end verified (`rerun`).
    `most`: bytes sent by the hub over the size of the repository, all runs together. `notice`:
    connections that go silent and must be seen within 45 s. `drive`: how it is run, by name.
    """

    name: str
    what: str
    faults: tuple[Fault, ...] = ()
    hub: dict[str, Any] = field(default_factory=dict)
    download: dict[str, Any] = field(default_factory=dict)
    drive: str = "plain"
    error: str = ""
    says: str = ""
    code: int = 0
    exit: int = 1
    rerun: bool = True
    most: float = 1.02
    notice: bool = False
    slow: bool = False


_CUT = cdn("truncate", times=1)

ROWS = (
    Row("a1", "stalls once", (cdn("stall", times=1),), notice=True, slow=True),
    Row(
        "a2",
        "stalls for ever",
        (cdn("stall"),),
        error="StepFailed",
        code=14,
        says=r"range",
        notice=True,
        slow=True,
    ),
    Row(
        "a3",
        "stalls after each MiB, four times",
        tuple(cdn("stall", at=16 * MIB + n * MIB, times=1) for n in range(4)),
        notice=True,
        slow=True,
    ),
    Row(
        "a3-for-ever",
        "stalls each half MiB; the floor judges it",
        (cdn("stall", after=MIB // 2),),
        download={"floor_window_s": 40.0, "floor_bytes_per_s": 200_000},
        error="StepFailed",
        code=14,
        says=r"range",
        notice=True,
        slow=True,
    ),
    Row(
        "a4",
        "accepts, never answers",
        (cdn("hang"),),
        error="StepFailed",
        code=14,
        says=r"range",
        notice=True,
        slow=True,
    ),
    Row(
        "a5",
        "HEAD and resolve hang once",
        (hub("hang", r"index\.json", method="HEAD", times=1), hub("hang", SHARD, times=1)),
        notice=True,
        slow=True,
    ),
    Row(
        "a6",
        "repo info hangs once",
        (hub("hang", "api/models/.*(revision|tree)", times=1),),
        slow=True,
    ),
    Row(
        "a6-for-ever",
        "repo info hangs for ever",
        (hub("hang", "api/models/.*(revision|tree)"),),
        error="HubSilent",
        says=r"did not answer for .*acme/tiny-hybrid",
        exit=3,
        slow=True,
    ),
    Row(
        "a6-xet",
        "Xet token hangs for ever; range takes over",
        (hub("hang", "xet-read-token"),),
        hub={"xet": True},
        download={"methods": ["hf-xet", "range"]},
        drive="by_xet",
        slow=True,
    ),
    Row(
        "a2-xet",
        "a shard stalls in Xet; range takes over",
        ({"where": "cas", "match": SHARD, "do": "stall", "after": 0.5},),
        hub={"xet": True},
        download={"methods": ["hf-xet", "range"]},
        drive="by_xet",
        notice=True,
        most=1.60,
        slow=True,
    ),
    Row("b", "drip of 1 byte/s", (cdn("drip", bps=1, times=1),), notice=True, slow=True),
    Row("c", "reset in the middle", (cdn("reset", times=1),)),
    Row("d", "short body", (_CUT,)),
    Row("e", "wrong byte once", (cdn("corrupt", times=1),), most=1.20),
    Row(
        "e-always",
        "wrong byte every time",
        (cdn("corrupt"),),
        error="StepFailed",
        code=10,
        says=r"expected [0-9a-f]{64}.* got [0-9a-f]{64}",
        drive="corrupt",
        most=1.40,
    ),
    Row(
        "f1",
        "429 with Retry-After 2, twice",
        (cdn("status", code=429, retry_after=2, times=2, match=""),),
        drive="held_back",
    ),
    Row("f2", "503 of the CDN once", (cdn("status", code=503, times=1),)),
    Row(
        "f3",
        "503 on HEAD and on resolve once",
        (
            hub("status", r"index\.json", method="HEAD", code=503, times=1),
            hub("status", SHARD, code=503, times=1),
        ),
    ),
    Row(
        "f4",
        "429 on the file list, twice",
        (hub("status", "api/models/.*(revision|tree)", code=429, retry_after=1, times=2),),
    ),
    Row("f5", "503 on repo info once", (hub("status", "api/models/", code=503, times=1),)),
    Row(
        "f6",
        "500 on the resumed GET",
        (_CUT, cdn("status", code=500, times=1)),
    ),
    Row(
        "g",
        "416 on the resumed GET",
        (_CUT, cdn("status", code=416, times=2)),
        most=1.10,
    ),
    Row("g2", "range ignored", (_CUT, cdn("norange")), most=1.10),
    Row("h", "another version between two runs", drive="other_version"),
    Row("i", "signed url expired", (_CUT,), hub={"url_ttl": 0.8}, drive="expired"),
    Row("j", "no room, known before", drive="no_room"),
    Row("j-filled", "the disk fills during the run", drive="filled"),
    Row("k", "kill -9 of the whole tree at 60 %", drive="killed"),
    Row("k-again", "the same with the controller killed too", drive="killed_both"),
    Row("k2", "SIGINT to the controller", drive="interrupted"),
    Row("k2-agent", "SIGINT to the agent", drive="interrupted_agent"),
    Row("l", "two controllers at once", drive="twice", most=1.001),
    Row("l-stranger", "another download of the folder", drive="stranger", most=1.001),
    Row("gated", "no token", hub={"token": "hf_right"}, drive="gated"),
)
