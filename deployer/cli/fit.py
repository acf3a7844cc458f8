"""`deploy fit`: what SGLang will effectively run, and where the memory goes. Read-only."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import click

from deployer import crosscheck_playbook
from deployer.catalog import Catalog
from deployer.cli.deadline import deadline
from deployer.cli.fit_host import Seen, fullest_gpu
from deployer.cli.fit_report import Answer, document, lines
from deployer.cli.options import Options, common
from deployer.cli.output import print_json
from deployer.document import load, read_text
from deployer.errors import DocumentError, UsageError
from deployer.names import did_you_mean, listed, shown
from deployer.playbook import ArgValue, Playbook
from deployer.sglang import compat
from deployer.sglang.engineversion import engine_of
from deployer.sglang.fit import (
    Machine,
    alternatives,
    evaluate,
    gpu_of,
    load_of,
    most_full_requests,
)
from deployer.sglang.modelconfig import ConfigNotUnderstood, parse_config
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.mtphead import has_head, headless
from deployer.sglang.serveflags import ServeFlags
from deployer.steps.venv_build import lock_pins
from deployer.validation import validate

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_LOCK_BYTES = 8 * 1024 * 1024
CARDS_MIB = {"A6000": 49140, "H200": 143771, "4090": 24564, "L40S": 46068}
"""`memory.total` of nvidia-smi, as recorded; by a word of the card's name."""


@click.command("fit")
@click.argument("name", metavar="PLAYBOOK")
@click.argument("host", metavar="[HOST[/NAME]]", required=False)
@click.option("--variant", metavar="NAME", default=None, help="A variant; default: the first.")
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=None,
    help="The model's config.json; default: the one in the Hugging Face cache.",
)
@click.option(
    "--free-gib",
    metavar="GIB",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Free GiB of the fullest GPU before the weights (SGLang's `Load weight begin` line).",
)
@click.option(
    "--gpu-mib",
    metavar="MIB",
    type=click.IntRange(min=1),
    default=None,
    help="MiB of one GPU (nvidia-smi memory.total); default: by the card named in the inventory.",
)
@click.option(
    "--weights-gib",
    metavar="GIB",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Weights on one GPU (`Load weight end. mem usage`); default: estimated.",
)
@click.option(
    "--draft-gib",
    metavar="GIB",
    type=click.FloatRange(min=0),
    default=None,
    help="Draft weights on one GPU while loading; default: estimated.",
)
@click.option(
    "--write",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=None,
    help="PLAYBOOK is a Hub id OWNER/NAME[@REVISION]: write a playbook for it on HOST.",
)
@common
def command(
    options: Options,
    name: str,
    host: str | None,
    variant: str | None,
    config_file: Path | None,
    free_gib: float | None,
    gpu_mib: int | None,
    weights_gib: float | None,
    draft_gib: float | None,
    write: Path | None,
) -> int:
    """Say what a playbook's server will effectively run, and where the memory of a GPU goes.

    SGLang's own arithmetic on config.json. Offline; only with HOST the memory in use now is read
    from that host's GPUs. Exit code 1 when it would not start or must not be used.
    """
    options.no_events("fit")
    if write is not None:
        return _write(options, name, host, write)
    path, playbook = _playbook(options, name)
    chosen, args = _arguments(playbook, variant, path)
    flags = _flags(args, path)
    shape, source, config_text = _shape(playbook, config_file)
    notes = [f"config.json: {source}"]
    used_mib = 0
    seen: Seen | None = None
    if host is not None:
        with deadline(options.timeout):
            seen = fullest_gpu(options, host, path.stem)
        gpu_mib, used_mib = seen.total_mib, seen.used_mib
        notes.append(
            f"the fullest GPU of {seen.deployment} now: {seen.name}, {used_mib} of {gpu_mib} MiB "
            "used; a server that runs there gives its part back at a restart"
        )
    if gpu_mib is None:
        gpu_mib = _card_mib(options, path.stem, notes)
    if gpu_mib is None and free_gib is None:
        raise UsageError(
            "the memory of the GPUs is not known",
            where=name,
            fix="give --gpu-mib (nvidia-smi --query-gpu=memory.total), or --free-gib",
        )
    cap = seen.compute_cap if seen is not None else ""
    gpu, assumed = gpu_of(gpu_mib, free_gib, flags.tp, used_mib, cap)
    tensors = seen.tensors if seen is not None else None
    weights, more = load_of(shape, flags, weights_gib, draft_gib, 0, tensors)
    version = playbook.engine.version
    machine = Machine(shape, version, gpu, weights, playbook.serve.env)
    unread = engine_of(version)[1]
    assumed += [*more, *([unread] if unread else [])]
    assumed += [f"--{flag} is not covered by the arithmetic" for flag in flags.unmodelled]
    fit = evaluate(machine, args)
    answer = Answer(
        name=path.stem,
        playbook=playbook,
        variant=chosen,
        machine=machine,
        fit=fit,
        problems=(
            *_problems(path, playbook, args, shape, seen),
            *headless(args, has_head(config_text, None)),
        ),
        others=alternatives(machine, args, fit),
        most_full=most_full_requests(machine, fit),
        assumed=tuple(assumed),
        notes=tuple(notes),
    )
    if options.as_json:
        print_json(document(answer))
    else:
        for line in lines(answer):
            click.echo(line)
    return answer.exit_code


def _problems(
    path: Path,
    playbook: Playbook,
    args: Mapping[str, ArgValue],
    shape: ModelShape,
    seen: Seen | None,
) -> list[compat.Problem]:
    """What is known to speak against it: by the playbook, its lock and what the host told."""
    lock = path.parent / playbook.engine.lock
    pins = lock_pins(read_text(lock, MAX_LOCK_BYTES)) if lock.is_file() else {}
    return compat.check(
        playbook.engine.version,
        args,
        shape.model_type,
        playbook.driver.version,
        shape=shape,
        capabilities=[seen.compute_cap] if seen is not None and seen.compute_cap else [],
        glibc=seen.libc if seen is not None else None,
        python=playbook.engine.python,
        pins=pins,
        env=playbook.serve.env,
    )


def _write(options: Options, name: str, host: str | None, target: Path) -> int:
    """A new playbook; only it needs the Hub and the host."""
    from deployer.cli.fit_write import write_playbook

    if host is None:
        raise UsageError("--write needs a host: its GPUs decide", fix="deploy fit MODEL HOST ...")
    path = write_playbook(options, name, host, target)
    if options.as_json:
        print_json({"written": str(path)})
    else:
        click.echo(f"wrote {shown(path)}; look at it, name it in the inventory, then `deploy up`")
    return 0


def _playbook(options: Options, name: str) -> tuple[Path, Playbook]:
    folder = options.inventory.resolve().parent / "playbooks"
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.exists():
        known = [file.stem for file in sorted(folder.glob("*.yaml"))]
        raise UsageError(
            f"there is no playbook {shown(path)}{did_you_mean(name, known)}",
            fix=f"playbooks there: {listed(known)}" if known else "name one, or give a file",
        )
    loaded = load(path)
    playbook = validate(loaded, Playbook)
    crosscheck_playbook.check_playbook(loaded, playbook)
    return path, playbook


def _arguments(
    playbook: Playbook, variant: str | None, path: Path
) -> tuple[str, dict[str, ArgValue]]:
    """The variant's name and the arguments with its changes; False removes a flag."""
    known = [rung.name for rung in playbook.variants]
    if variant and variant not in known:
        raise UsageError(
            f"playbook {path.stem} has no variant `{variant}`{did_you_mean(variant, known)}",
            where=shown(path),
            fix=f"variants: {listed(known)}",
        )
    chosen = variant or (known[0] if known else "base")
    args = dict(playbook.serve.args)
    for rung in playbook.variants:
        if rung.name == chosen:
            args.update(rung.args)
    return chosen, {flag: value for flag, value in args.items() if value is not False}


def _flags(args: Mapping[str, ArgValue], path: Path) -> ServeFlags:
    try:
        return ServeFlags.from_args(args)
    except ValueError as error:
        raise DocumentError(
            f"serve.args: {error}", where=shown(path), fix="correct the value"
        ) from error


def _shape(playbook: Playbook, given: Path | None) -> tuple[ModelShape, str, str]:
    """The model's shape, where its config came from, and the config."""
    path = given or _cached(playbook)
    if path is None:
        model, endpoint = playbook.model, playbook.download.endpoint.rstrip("/")
        address = f"{endpoint}/{model.repo}/resolve/{model.revision}/config.json"
        raise UsageError(
            f"no config.json of {model.repo} is on this machine",
            fix=f"curl -fLo config.json {shlex.quote(address)}, then --config config.json",
        )
    try:
        text = read_text(path, MAX_CONFIG_BYTES)
        return parse_config(text), shown(path), text
    except ConfigNotUnderstood as error:
        raise UsageError(
            str(error), where=shown(path), fix="this model cannot be planned; nothing is guessed"
        ) from error


def _cached(playbook: Playbook) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    model = playbook.model
    found = try_to_load_from_cache(model.repo, "config.json", revision=model.revision)
    return Path(found) if isinstance(found, str) else None


def _card_mib(options: Options, playbook: str, notes: list[str]) -> int | None:
    """The card of the deployment that uses this playbook, by its name in the inventory."""
    if not options.inventory.is_dir():
        return None
    for host_name, host in Catalog.load(options.inventory).hosts.items():
        if all(entry.playbook != playbook for entry in host.deployments.values()):
            continue
        for gpu in host.gpus:
            for word, mib in CARDS_MIB.items():
                if gpu.name and word in gpu.name:
                    notes.append(f"{mib} MiB a GPU: {gpu.name} of {host_name} in the inventory")
                    return mib
    return None
