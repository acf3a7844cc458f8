"""`deploy fit MODEL HOST --write FILE`: a commented playbook for a model that has none yet."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from deployer import crosscheck_playbook, hub
from deployer.catalog import Catalog
from deployer.cli.fit_host import Seen, fullest_of
from deployer.cli.options import Options
from deployer.deployment import Deployment
from deployer.document import load, parse
from deployer.errors import StepBlocked, UsageError
from deployer.inventory import DeploymentEntry
from deployer.names import shown
from deployer.playbook import ArgValue, Playbook
from deployer.sglang.compat import check, parse_version
from deployer.sglang.fit import Fit, Machine, gpu_of, load_of
from deployer.sglang.modelconfig import ConfigNotUnderstood, parse_config
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.parsers import REASONING, known_parsers
from deployer.sglang.proposal import Proposal, propose, tensor_parallel
from deployer.sglang.serveflags import ServeFlags
from deployer.state import Manifest
from deployer.validation import validate

ENGINE, LOCK, DRIVER = "0.5.11", "locks/sglang-0.5.11.txt", "580.126.09"
"""What the sample playbook and its lock are for; real runs were made with it."""


@dataclass(frozen=True)
class Draft:
    """Everything that the text is made of."""

    name: str
    playbook: Playbook
    manifest: Manifest
    shape: ModelShape
    seen: Seen
    proposal: Proposal
    assumed: tuple[str, ...]


def write_playbook(options: Options, model: str, word: str, target: Path) -> Path:
    """Asks the Hub for the model, the host for its GPUs, and writes the playbook.

    Raises UsageError for bad words or a file that exists, HubError, the host's error, and
    StepBlocked when no set of flags fits.
    """
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{shown(target)} is no YAML file name", fix="--write playbooks/NAME.yaml")
    if target.exists():
        raise UsageError(f"{shown(target)} exists", fix="remove it, or give another name")
    name = target.stem
    playbook = _first(name, model)
    want = _deployment(Catalog.load(options.inventory), word, name, playbook)
    manifest = hub.fetch_manifest(playbook, os.environ.get(playbook.download.token_env) or None)
    click.echo(
        f"{manifest.repo} {manifest.asked} is {manifest.commit[:12]}: {len(manifest.files)} files",
        err=True,
    )
    shape = _shape(playbook, manifest)
    seen = fullest_of(options, want)
    draft = _draft(name, playbook, manifest, shape, seen, len(want.gpus))
    text = playbook_text(draft)
    document = parse(target, text)
    crosscheck_playbook.check_playbook(document, validate(document, Playbook))
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("x", encoding="utf-8") as stream:
        stream.write(text)
    load(target)
    return target


def _first(name: str, model: str) -> Playbook:
    """A playbook with the defaults, for the questions that need one."""
    repo, _, revision = model.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(
            f"{model!r} is not a Hub id", fix="with --write: deploy fit OWNER/NAME[@REVISION] HOST"
        )
    served = repo.partition("/")[2].lower()
    text = json.dumps(
        {
            "model": {
                "repo": repo,
                "revision": revision or "main",
                "path": f"/srv/models/{served}",
                "served_name": served,
            },
            "driver": {"version": DRIVER},
            "engine": {"version": ENGINE, "lock": LOCK, "venv": f"/opt/deployer/venvs/{name}"},
        }
    )
    return validate(parse(Path(f"{name}.yaml"), text), Playbook)


def _deployment(catalog: Catalog, word: str, name: str, playbook: Playbook) -> Deployment:
    """The GPUs of HOST or HOST/NAME, as a deployment of the new playbook."""
    host_name, _, entry_name = word.partition("/")
    host = catalog.host(host_name)
    entries = host.deployments
    known = entries.get(entry_name) if entry_name else next(iter(entries.values()), None)
    container = known.container if known else next(iter(host.containers), None)
    entry = DeploymentEntry(container=container, playbook=name, gpus=known.gpus if known else None)
    return Deployment(host_name, entry_name or name, host, entry, playbook, name, "")


def _shape(playbook: Playbook, manifest: Manifest) -> ModelShape:
    token = os.environ.get(playbook.download.token_env) or None
    try:
        return parse_config(hub.fetch_text(playbook, manifest, "config.json", token))
    except ConfigNotUnderstood as error:
        raise UsageError(
            str(error),
            where=f"{manifest.repo} config.json",
            fix="this model cannot be planned; copy a playbook and find its flags by trying",
        ) from error


def _draft(
    name: str,
    playbook: Playbook,
    manifest: Manifest,
    shape: ModelShape,
    seen: Seen,
    gpus: int,
) -> Draft:
    tp = tensor_parallel(shape, gpus)
    gpu, assumed = gpu_of(seen.total_mib, None, tp, 0, seen.compute_cap)
    size = sum(file.size for file in manifest.files if file.path.endswith(".safetensors"))
    draft: dict[str, ArgValue] = {"speculative-algorithm": "NEXTN"} if shape.mtp_layers else {}
    flags = ServeFlags.from_args({"tp-size": tp, **draft})
    weights, more = load_of(shape, flags, None, None, size)
    found = propose(Machine(shape, ENGINE, gpu, weights), tp)
    _must_run(manifest, shape, seen, {"tp-size": tp})
    if isinstance(found, Fit):
        why = found.refusal.error if found.refusal is not None else "no request of 4096 tokens fits"
        raise StepBlocked(
            f"{manifest.repo} does not fit on {tp} x {seen.total_mib} MiB: {why}",
            where=seen.deployment,
            fix="use more or larger GPUs, or a quantised repository of the model",
        )
    return Draft(name, playbook, manifest, shape, seen, found, (*assumed, *more))


def _must_run(
    manifest: Manifest, shape: ModelShape, seen: Seen, args: Mapping[str, ArgValue]
) -> None:
    """Raises StepBlocked when this engine is known not to serve the model on these GPUs."""
    caps = [seen.compute_cap] if seen.compute_cap else []
    problems = check(ENGINE, args, shape.model_type, DRIVER, shape=shape, capabilities=caps)
    if problems:
        raise StepBlocked(
            f"{manifest.repo}: {problems[0].reason}", where=seen.deployment, fix=problems[0].change
        )


def playbook_text(draft: Draft) -> str:
    """The YAML text. Pure."""
    model, engine = draft.playbook.model, draft.playbook.engine
    size = sum(file.size for file in draft.manifest.files)
    lines = [
        f"# {model.repo} on {draft.proposal.args['tp-size']} x {draft.seen.name}"
        f" ({draft.seen.total_mib} MiB), SGLang {engine.version}.",
        "# Written by `deploy fit --write`: flags by SGLang's own arithmetic, not yet by a run.",
        "# `deploy help playbook` explains every key; what is not here has its default.",
        *[f"# assumed: {line}" for line in draft.assumed],
        "",
        "model:",
        f"  repo: {_scalar(model.repo)}",
        f"  revision: {_scalar(model.revision)}    # {draft.manifest.commit} when this was written",
        f"  path: {_scalar(model.path)}    # {size / 1e9:.1f} GB",
        f"  served_name: {_scalar(model.served_name)}",
        "",
        "driver:",
        f"  version: {DRIVER}    # SGLang 0.5.11 and newer need >= 580 (CUDA 13)",
        "",
        "engine:",
        f"  version: {engine.version}",
        f"  lock: {engine.lock}    # beside this file",
        f"  venv: {_scalar(engine.venv)}",
        "",
        "serve:",
        "  args:",
        *_args(draft.proposal.args, 4),
    ]
    if "reasoning-parser" not in draft.proposal.args:
        known = ", ".join(sorted(known_parsers(parse_version(ENGINE) or (0,), REASONING)))
        lines.append("    # reasoning-parser: NAME    # for a model that thinks before it answers;")
        lines += [f"    #   {line}" for line in textwrap.wrap(f"one of {known}", 90)]
    lines += ["", "variants:    # rungs of the ladder; the first is launched"]
    for name, more in draft.proposal.variants.items():
        lines.append(f"  - name: {name}    # {_figures(draft.proposal.fits[name])}")
        if more:
            lines += ["    args:", *_args(more, 6)]
    lines += _others(draft)
    return "\n".join(lines) + "\n"


def _others(draft: Draft) -> list[str]:
    """Further rungs, commented out: what they change, what they run, and what they cost."""
    first = next(iter(draft.proposal.variants.items()))
    lines = []
    for other in draft.proposal.others:
        changed = {**first[1], **other.args}
        name = re.sub(r"[^a-z0-9]+", "-", other.title.lower().replace("'s", "s")).strip("-")
        lines += [
            f"  # {other.title}: {other.trade}",
            f"  #   ({_figures(other.fit)})",
            f"  # - name: {name}",
            "  #   args:",
            *[f"  #     {line.strip()}" for line in _args(changed, 0)],
        ]
    if lines:
        lines.insert(0, "  # Other sets worth a thought: take the marks away to use one.")
    return lines


def _args(args: Mapping[str, ArgValue], indent: int) -> list[str]:
    return [f"{' ' * indent}{flag}: {_scalar(value)}" for flag, value in args.items()]


def _scalar(value: ArgValue) -> str:
    """YAML of one value; a JSON string is a YAML string."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./+-]*", value):
        return json.dumps(value) if value.lower() in _WORDS else value
    return json.dumps(value)


_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def _figures(fit: Fit) -> str:
    if fit.pools is None:
        return ""
    pools = fit.pools
    return (
        f"{pools.max_running} requests at once, {pools.tokens:,} KV tokens, "
        f"{pools.full_requests} of the full context"
    )
