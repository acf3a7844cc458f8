"""What is known to speak against a launch before anything is installed or downloaded. Pure.

It judges what the playbook wants (its engine, its driver, its lock), not what is installed now: the
steps before launch change that.
"""

from __future__ import annotations

import json

from deployer.deployment import Deployment
from deployer.model import Facts, Plan
from deployer.sglang.compat import Problem, check
from deployer.sglang.modelconfig import ConfigNotUnderstood, parse_config
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.mtphead import has_head, headless
from deployer.state import Manifest
from deployer.steps.driver_facts import HostSmi
from deployer.steps.server_facts import ServerFact
from deployer.steps.venv_build import lock_pins


def settled_problems(
    want: Deployment, facts: Facts, manifest: Manifest | None, variant: str
) -> list[Problem]:
    """Reasons that no step before launch can lift."""
    server, playbook = facts.get(ServerFact), want.playbook
    args = want.serve_args(variant)
    config = config_text(want, server, manifest)
    found = check(
        playbook.engine.version,
        args,
        model_type(config) or (server.model_type if server is not None else None),
        _driver(want, server, facts.get(HostSmi)),
        shape=shape_in(config),
        capabilities=capabilities(want, facts.get(HostSmi)),
        glibc=(server.libc if server is not None else "") or None,
        python=playbook.engine.python,
        pins=lock_pins(want.lock_text),
        env=playbook.serve.env,
    )
    return [*found, *headless(args, has_head(config, None))]


def refusal(problems: list[Problem], *, stands: bool) -> Plan:
    """The plan of a step that must not act."""
    return Plan.blocked(
        "; ".join(problem.reason for problem in problems),
        "; ".join(dict.fromkeys(problem.change for problem in problems)),
        stands=stands,
    )


def config_text(want: Deployment, server: ServerFact | None, manifest: Manifest | None) -> str:
    """The model's config.json: of the pinned revision, else the target's; '' when there is none."""
    model = want.playbook.model
    if manifest is not None and manifest.config and manifest.repo == model.repo:
        return manifest.config
    return server.config if server is not None else ""


def model_type(config: str) -> str | None:
    """`model_type` of a config's text; None when it says none."""
    try:
        data = json.loads(config)
    except ValueError:
        return None
    kind = data.get("model_type") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def shape_in(config: str) -> ModelShape | None:
    """The shape in a config's text; None when it is not understood."""
    if not config:
        return None
    try:
        return parse_config(config)
    except ConfigNotUnderstood:
        return None


def capabilities(want: Deployment, smi: HostSmi | None) -> tuple[str, ...]:
    """Compute capability of the deployment's GPUs, as the host's nvidia-smi tells it."""
    rows = {row.address.lower(): row for row in smi.gpus} if smi is not None else {}
    seen = [rows.get(address.lower()) for address in want.gpus]
    return tuple(row.compute_cap for row in seen if row is not None and row.compute_cap)


def _driver(want: Deployment, server: ServerFact | None, smi: HostSmi | None) -> str:
    """The driver that the server will run on."""
    wanted = want.playbook.driver
    if wanted.install != "never":
        return wanted.version
    rows = [row.driver for row in smi.gpus if row.driver] if smi is not None else []
    return (server.driver if server is not None else None) or (rows or [wanted.version])[0]
