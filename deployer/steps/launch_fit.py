"""What the server will effectively run, as `launch` says it before and checks it afterwards. Pure.

SGLang's own arithmetic on the target's config.json, the sizes of the pinned files and the memory of
the deployment's GPUs. It informs: only the server itself decides whether it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.model import Facts
from deployer.sglang.engineversion import engine_of
from deployer.sglang.fit import Fit, Machine, evaluate, gpu_of, load_of
from deployer.sglang.modelconfig import ConfigNotUnderstood, parse_config
from deployer.sglang.serveflags import ServeFlags
from deployer.state import Manifest
from deployer.steps.driver_facts import HostSmi
from deployer.steps.server_compat import capabilities, config_text
from deployer.steps.server_facts import ServerFact
from deployer.steps.weights_facts import WeightsFact

TOLD_APART = 0.01
"""Share by which pools may fall short of the plan without a likely cause being told."""


@dataclass(frozen=True)
class Outlook:
    """The plan of one variant. `fit` is None when nothing could be computed: `why`."""

    fit: Fit | None
    why: str
    assumed: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """One line for a reader."""
        if self.fit is None:
            return f"what it will effectively run is not known: {self.why}"
        if self.fit.refusal is not None:
            return f"by SGLang's own arithmetic it will not start: {self.fit.refusal.error}"
        pools, resolved = self.fit.pools, self.fit.resolved
        if pools is None or resolved is None:
            return f"what it will effectively run is not known: {self.why}"
        asked = resolved.max_running
        short = f" of {asked} asked" if asked is not None and pools.max_running < asked else ""
        text = f"will run {pools.max_running}{short} requests at once, {pools.tokens} KV tokens"
        if pools.slots is not None:
            text += f", {pools.slots} state slots"
        text += f", {pools.slack:.1f} GiB slack a GPU"
        if self.fit.slack_short > 0:
            text += (
                f"; what SGLang takes from that slack later needs {self.fit.slack_short:.1f} GiB "
                "more by this estimate: lower mem-fraction-static if the capture runs out of memory"
            )
        return text

    @property
    def figures(self) -> dict[str, float]:
        """The planned pools, for the record of the launch."""
        pools = self.fit.pools if self.fit is not None else None
        if pools is None:
            return {}
        return {
            "planned_tokens": float(pools.tokens),
            "planned_requests": float(pools.max_running),
        }


def outlook(want: Deployment, facts: Facts, manifest: Manifest | None, variant: str) -> Outlook:
    """The plan of `variant`; an Outlook without a fit says why there is none."""
    found = machine_of(want, facts, manifest, variant)
    if isinstance(found, str):
        return Outlook(None, found)
    machine, assumed = found
    try:
        args = want.serve_args(variant)
        fit = evaluate(machine, args)
        unmodelled = ServeFlags.from_args(args).unmodelled
    except ValueError as error:
        return Outlook(None, str(error))
    more = [f"--{flag} is not covered by the arithmetic" for flag in unmodelled]
    return Outlook(fit, "", (*assumed, *more))


def machine_of(
    want: Deployment, facts: Facts, manifest: Manifest | None, variant: str
) -> tuple[Machine, tuple[str, ...]] | str:
    """What `variant` will find: model, engine, free memory and weights; or why that is not known.

    With it what had to be assumed, in words.
    """
    fact = facts.get(ServerFact)
    config = config_text(want, fact, manifest)
    if fact is None or not config:
        return "the target has no config.json yet"
    try:
        shape = parse_config(config)
        flags = ServeFlags.from_args(want.serve_args(variant))
    except (ConfigNotUnderstood, ValueError) as error:
        return str(error)
    memory = _memory(want, facts.get(HostSmi))
    if memory is None:
        return "nvidia-smi of the host does not tell the memory of the GPUs"
    total_mib, used_mib = memory
    # A server that is still there gives its memory back before this one starts.
    busy = fact.listening or (fact.job is not None and fact.job.alive)
    kinds = capabilities(want, facts.get(HostSmi))
    gpu, assumed = gpu_of(
        total_mib, None, flags.tp, 0 if busy else used_mib, kinds[0] if kinds else ""
    )
    version = fact.engine or want.playbook.engine.version
    unread = engine_of(version)[1]
    weights = facts.get(WeightsFact)
    tensors = weights.tensors if weights is not None else None
    load, more = load_of(shape, flags, None, None, _checkpoint_bytes(manifest), tensors)
    machine = Machine(shape, version, gpu, load, want.playbook.serve.env)
    return machine, (*assumed, *more, *([unread] if unread else []))


def difference(planned: Mapping[str, float], seen: Mapping[str, float]) -> str:
    """How the server's own pools differ from the plan, in words; '' without both figures."""
    pairs = (
        ("KV tokens", planned.get("planned_tokens"), seen.get("max_total_num_tokens")),
        ("requests at once", planned.get("planned_requests"), seen.get("max_running_requests")),
    )
    parts, fewer = [], False
    for name, ours, real in pairs:
        if not ours or real is None:
            continue
        share = real / ours - 1
        fewer = fewer or share < -TOLD_APART
        than = "more" if share > 0 else "fewer"
        told = f"{abs(share):.1%} {than} than planned" if abs(share) >= 0.0005 else "as planned"
        parts.append(f"{real:.0f} {name} ({told})")
    if not parts:
        return ""
    told = "the server has " + ", ".join(parts)
    return told + (": other processes on the GPUs, or a version that differs" if fewer else "")


def _memory(want: Deployment, smi: HostSmi | None) -> tuple[int, int] | None:
    """MiB in all and in use of the fullest GPU of the deployment."""
    rows = {row.address.lower(): row for row in smi.gpus} if smi is not None else {}
    found = []
    for address in want.gpus:
        row = rows.get(address.lower())
        if row is None or row.memory_total_mib is None or row.memory_used_mib is None:
            return None
        found.append((row.memory_total_mib, row.memory_used_mib))
    return min(found, key=lambda one: one[0] - one[1]) if found else None


def _checkpoint_bytes(manifest: Manifest | None) -> int:
    files = manifest.files if manifest is not None else []
    return sum(file.size for file in files if file.path.endswith(".safetensors"))
