"""The same work on all nodes of one server at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.errors import Defect, DeployError, Interrupted
from deployer.fleet import run_hosts


def together(works: Mapping[str, Callable[[], None]], cancel: Cancel) -> dict[str, DeployError]:
    """Runs `works` (host -> work), each in a thread; returns when all have ended, with the errors.

    Raises the interrupt or the command's deadline when it came meanwhile.
    """

    def one(host: str, group: object) -> DeployError | None:
        try:
            works[host]()
        except DeployError as error:
            return error
        except (KeyboardInterrupt, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - told with its host; the others go on
            return Defect.of(error, host)
        return None

    def lost(host: str, error: DeployError) -> DeployError | None:
        return error

    groups: dict[str, list[Deployment]] = {host: [] for host in works}
    done = run_hosts(groups, one, lost, cancel=cancel)
    cancel.check(", ".join(works))
    return {host: error for host, error in done.items() if error is not None}


def raise_first(errors: Mapping[str, DeployError]) -> None:
    """The first of several nodes' errors, with the others in its words; an interrupt goes first."""
    told = sorted(errors.values(), key=lambda one: not isinstance(one, Interrupted))
    if not told:
        return
    for other in told[1:]:
        told[0].add(f"besides: {other}")
    raise told[0]
