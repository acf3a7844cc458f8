"""`deploy doctor` of hosts without deployments: what `deploy init` finds, and the inventory held
against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import click

from deployer.cancel import Cancel
from deployer.cli.deadline import deadline
from deployer.cli.options import Options
from deployer.errors import Defect, DeployError
from deployer.findings import Finding, of_error
from deployer.fleet import Slots, run_hosts
from deployer.inventory import Host
from deployer.names import listed
from deployer.survey import survey
from deployer.survey_findings import findings, in_vain


@dataclass(frozen=True)
class BareLook:
    """What was found on one host. `error`: why it could not be asked."""

    found: list[Finding] = field(default_factory=list)
    error: DeployError | None = None


def look_at_bare(options: Options, hosts: Mapping[str, Host]) -> dict[str, BareLook]:
    """One look a host, in parallel; no lock, no change."""
    if not hosts:
        return {}

    cancel = Cancel()

    def work(name: str, _: object) -> BareLook:
        try:
            seen = survey(name, hosts[name].ssh, options.inventory, cancel)
        except DeployError as error:
            return lost(name, cancel.error(name) if cancel.asked else error)
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - told with its host, beside what others say
            return lost(name, Defect.of(error, name))
        return BareLook([*in_vain(name, hosts[name], seen), *findings(name, seen)])

    def lost(name: str, error: DeployError) -> BareLook:
        return BareLook([of_error(error, name)], error)

    with deadline(options.timeout):
        return run_hosts(
            {name: () for name in hosts},
            work,
            lost,
            cancel=cancel,
            slots=Slots(options.parallel),
            waits_for=lambda names: click.echo(f"waiting for {listed(names)}", err=True),
        )
