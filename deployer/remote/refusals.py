"""What a machine has refused for good: this command does not ask for it again.

A login that is refused counts there (fail2ban, PerSourcePenalties of sshd), and every deployment of
a host, and every host behind a gateway, would try it anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deployer import errors
from deployer.remote.gateways import same_machine
from deployer.remote.sshconfig import Endpoint


class Refusals:
    """By machine and by the keys that are offered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Endpoint, errors.AuthenticationRefused] = {}

    @contextmanager
    def kept(self, endpoint: Endpoint) -> Iterator[None]:
        """One login within the block. Raises AuthenticationRefused when one was refused before."""
        key = same_machine(endpoint)
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            raise placed(known, known.where, endpoint.name)
        try:
            yield
        except errors.AuthenticationRefused as error:
            # Through a gateway, it may be the gateway's.
            if error.where == endpoint.name:
                with self._lock:
                    self._known[key] = error
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
