"""Every phase of a start has a deadline of its own. Pure: the time is handed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployer.playbook import Phases
from deployer.sglang.failure import Failure
from deployer.sglang.log import WORDS, LaunchLog


@dataclass(frozen=True)
class Limit:
    """`setting` is the name in `serve.phases`; `helps` what a reader can do."""

    setting: str
    helps: str
    next_variant: bool = False
    """May the next rung be tried? Where only the arguments of a variant matter."""


START = Limit("start_s", "see that the disk of the venv answers (`deploy doctor`)")
POOLS = Limit("pools_s", "a GPU that hangs: read the host's `dmesg` for Xid lines")
WARMUP = Limit(
    "warmup_s", "the first start compiles kernels: see that nvcc and ninja run at all", True
)
LIMITS = {
    "starting": START,
    "args": START,
    "tokenizer": START,
    "distributed": Limit(
        "distributed_s", "the GPUs do not reach each other: try serve.env NCCL_P2P_DISABLE: '1'"
    ),
    "weights": Limit("weights_s", "a slow disk or network mount below model.path"),
    "kv": POOLS,
    "mamba": POOLS,
    "graphs": Limit(
        "graphs_s",
        "lower cuda-graph-max-bs, or try disable-custom-all-reduce, at last disable-cuda-graph",
        True,
    ),
    "server": WARMUP,
    "warmup": WARMUP,
    "ready": WARMUP,
}


@dataclass
class PhaseClock:
    """Measures how long the log stays in one stage. A stage that comes again starts anew."""

    limits: Phases
    began: float
    _stage: tuple[str, int] = field(default=("starting", 0))

    def overdue(self, log: LaunchLog, now: float) -> Failure | None:
        """The failure when the stage that the log is in has lasted too long."""
        if log.stage != self._stage:
            same = LIMITS[log.stage[0]] is LIMITS[self._stage[0]]
            self._stage = log.stage
            # Phases that share a limit share its time.
            if not same:
                self.began = now
        limit = LIMITS[self._stage[0]]
        seconds = getattr(self.limits, limit.setting)
        if now - self.began <= seconds:
            return None
        what, done, total, unit = log.progress()
        far = f"{what}, {done:g} of {total:g} {unit}" if unit != "phases" else what
        phase = self._stage[0]
        return Failure(
            "phase-overdue",
            f"phase `{phase}` ({WORDS[phase]}) takes longer than {seconds:g} s; so far: {far}",
            f"{limit.helps}; if it still makes progress, raise serve.phases.{limit.setting}",
            limit.next_variant,
        )
