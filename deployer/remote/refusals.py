"""What a machine has refused: this command does not ask for it again at once.

A login that is refused counts there (fail2ban, PerSourcePenalties of sshd), and every deployment of
a host, and every host behind a gateway, would try it anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deployer import errors
from deployer.remote.gateways import same_machine
from deployer.remote.sshconfig import Endpoint

KEPT_S = 20.0
"""For so long a refusal counts: a guest that still boots may take the same key a little later."""


class Refusals:
    """By machine and by the keys that are offered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Endpoint, tuple[float, errors.AuthenticationRefused]] = {}

    @contextmanager
    def kept(self, endpoint: Endpoint) -> Iterator[None]:
        """One login within the block. Raises AuthenticationRefused when one was refused before."""
        key = same_machine(endpoint)
        with self._lock:
            since, known = self._known.get(key, (0.0, None))
        if known is not None and time.monotonic() - since < KEPT_S:
            raise placed(known, known.where, endpoint.name)
        try:
            yield
        except errors.AuthenticationRefused as error:
            # Through a gateway, it may be the gateway's.
            if error.where == endpoint.name:
                with self._lock:
                    self._known[key] = time.monotonic(), error
            raise


def placed(error: errors.DeployError, before: str, name: str) -> errors.DeployError:
    """The error of a machine that is `before` in it, told of `name`: one machine, two targets."""
    trust = "`deploy trust {}`"
    return type(error)(
        error.what,
        where=name + error.where[len(before) :] if error.where.startswith(before) else error.where,
        fix=error.fix.replace(
            trust.format(before.partition(" (")[0]), trust.format(name.partition(" (")[0])
        ),
        evidence=error.evidence,
    )
