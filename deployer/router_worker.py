"""What a router says of its workers, and which of them are one server. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployer.names import same_url

NEUTRAL = (50, 1.0)
"""Priority and cost that a router gives by itself."""
_RANK = re.compile(r"@\d{1,4}$")


@dataclass(frozen=True)
class Worker:
    """One worker as the router lists it. `load` is 0 where the router does not count it."""

    id: str
    url: str
    models: tuple[str, ...] = ()
    """Names by which clients ask for it; none when the router does not know."""
    healthy: bool = False
    status: str = ""
    """smg: pending, ready, draining, ...; '' with sglang-router."""
    load: int = 0
    why: str = ""
    """What the router says of an addition that has not come about yet."""
    kind: str = "regular"
    """regular, prefill, decode, ..."""
    priority: int = NEUTRAL[0]
    cost: float = NEUTRAL[1]
    failed: bool = False
    """Its addition has ended without it."""

    @property
    def ready(self) -> bool:
        """Does it get requests?"""
        return self.healthy and self.status in ("", "ready")

    @property
    def draining(self) -> bool:
        """It gets none any more, and some may still run on it."""
        return self.status == "draining"

    @property
    def ranked(self) -> bool:
        """Is it one data-parallel rank of a server?"""
        return _RANK.search(self.url) is not None

    def is_at(self, url: str) -> bool:
        """Is it, or is it a rank of, the server of this URL?"""
        return same_url(_RANK.sub("", self.url), url)


def parse_worker(row: Any) -> Worker | None:
    """A row of GET /workers or the answer of GET /workers/ID; None when it is no worker."""
    if not isinstance(row, dict) or not isinstance(row.get("url"), str):
        return None
    job, load = row.get("job_status"), row.get("load")
    job = job if isinstance(job, dict) else {}
    priority, cost = row.get("priority"), row.get("cost")
    return Worker(
        str(row.get("id", "")),
        row["url"],
        _models(row),
        row.get("is_healthy") is True,
        str(row.get("status") or ""),
        load if isinstance(load, int) else 0,
        str(job.get("message") or job.get("status") or ""),
        str(row.get("worker_type") or "regular"),
        priority if isinstance(priority, int) else NEUTRAL[0],
        float(cost) if isinstance(cost, int | float) else NEUTRAL[1],
        job.get("status") == "failed" or row.get("status") == "failed",
    )


def _models(row: dict[str, Any]) -> tuple[str, ...]:
    listed = row.get("models")
    names = [one.get("id") if isinstance(one, dict) else one for one in listed or ()]
    names = names or [row.get("model_id")]
    return tuple(str(name) for name in names if name and name != "unknown")


def at(workers: Sequence[Worker], url: str) -> Worker | None:
    """What the list says of a server: ready when it, or each of its ranks, is.

    One that drains counts only where nothing else of it is listed.
    """
    rows = [one for one in workers if one.is_at(url)]
    live = [one for one in rows if not one.draining]
    if not live:
        return rows[0] if rows else None
    whole = next((one for one in live if one.ready and not one.ranked), None)
    return whole or next((one for one in live if not one.ready), live[0])


def told(workers: Sequence[Worker]) -> str:
    """The URLs of a list, for people."""
    return ", ".join(one.url for one in workers) or "none"
