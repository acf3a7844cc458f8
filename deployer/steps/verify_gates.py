"""The gates: what a launch must pass before it counts as serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployer.errors import GateFailed
from deployer.events import GateChecked
from deployer.remote.jobs import JobStatus
from deployer.sglang.failures import classify, telling_lines
from deployer.shell import quote
from deployer.steps.gates_bench import Asked, Bench, GateFault
from deployer.steps.gates_identity import alive, before_load, identity, weights
from deployer.steps.gates_judge import Fault
from deployer.steps.gates_load import burst, context_edge
from deployer.steps.gates_speculation import speculation, wanted
from deployer.steps.gates_speed import compared, speed
from deployer.steps.gates_text import answers, counting, long_prompt, quality
from deployer.steps.launch_evidence import Evidence

LOG_END = 256 * 1024
DYING_S = 4.0
"""How long a crash takes from the first failed request to the end of the process."""

Gate = Callable[[Bench], str | None]
"""What was seen, in words; None when the playbook does not ask for the gate."""

GATES: tuple[tuple[str, Gate], ...] = (
    ("identity", identity),
    ("weights", weights),
    ("answers", answers),
    ("quality", quality),
    ("counting", counting),
    ("long prompt", long_prompt),
    ("burst", burst),
    ("context edge", context_edge),
    ("speed", speed),
    ("speculation", speculation),
    ("figures", compared),
    ("alive", alive),
)
LOADED_FROM = "burst"
"""The first gate that means load: GPU memory is read before it."""


@dataclass(frozen=True)
class Failure:
    """The gate that was not passed. `asked` can be put to another server; `died`: it is gone."""

    gate: str
    fault: Fault
    asked: tuple[Asked, ...]
    speculative: bool
    died: bool
    error: GateFailed

    @property
    def comparable(self) -> bool:
        """Would the same questions to a server without speculation tell anything?"""
        return (
            self.speculative and not self.died and bool(self.asked) and self.fault.kind == "output"
        )


@dataclass
class Gates:
    """Runs the gates of one launch in order; the first that fails ends them."""

    bench: Bench
    failure: Failure | None = None

    def run(self, gates: Sequence[tuple[str, Gate]] = GATES) -> dict[str, float]:
        """The figures that were measured. Raises GateFailed; `failure` has then more of it."""
        for number, (name, gate) in enumerate(gates):
            if name == LOADED_FROM:
                before_load(self.bench)
            self.bench.context.progress("gates", number, len(gates), "", name)
            try:
                detail = gate(self.bench)
            except GateFault as found:
                raise self._failed(name, found) from found
            if detail is not None:
                self._emit(name, True, detail, "")
        return self.bench.figures

    def _failed(self, gate: str, found: GateFault) -> GateFailed:
        """Says it when the server died, with its own last words."""
        want, fault = self.bench.context.want, found.fault
        why, fix = fault.why, fault.fix or self._way_out()
        lines = tuple(line for line in fault.evidence.split("\n") if line.strip())
        status = self._status(DYING_S if fault.kind in {"request", "gone"} else 0.0)
        if not status.alive:
            log = self._log_end()
            seen = Evidence(self.bench.context, self.bench.job).gather()
            failure = classify(log, status.exit, "ready", host=seen)
            why = f"the server died during this gate (exit {status.exit}): {why}"
            if failure.cls != "unknown":
                why, fix = f"{why}; {failure.cls}: {failure.cause_line}", failure.action
            lines = (*lines, *telling_lines(log))
        if key := self.bench.api_key:
            why = why.replace(key, "***")
            lines = tuple(line.replace(key, "***") for line in lines)
        self._emit(gate, False, why, "\n".join(lines))
        error = GateFailed(
            f"gate {gate!r} failed: {why}", where=f"{want.id} verify", fix=fix, evidence=lines
        )
        self.failure = Failure(
            gate, fault, found.asked, wanted(self.bench), not status.alive, error
        )
        return error

    def _way_out(self) -> str:
        """The next variant after the one that was launched; the log when there is none."""
        want = self.bench.context.want
        names = [variant.name for variant in want.playbook.variants]
        launched = self.bench.variant
        later = names[names.index(launched) + 1 :] if launched in names else []
        if later:
            return f"try the next variant: `deploy up {want.id} --variant {later[0]}`"
        return f"read `deploy logs {want.id}`: no other variant is left in the playbook"

    def _status(self, patience_s: float) -> JobStatus:
        """The job now; one that is about to die gets `patience_s` to do so."""
        bench = self.bench
        ends = bench.now() + patience_s
        while True:
            status = bench.context.jobs(bench.context.want.guest).poll(bench.job)
            if not status.alive or bench.now() >= ends:
                return status
            bench.sleep(0.5)

    def _log_end(self) -> str:
        context, job = self.bench.context, self.bench.job
        guest = context.want.guest
        log = f"{context.jobs(guest).root}/{job.name}/{job.id}/log"
        return context.on(guest).run(f"tail -c {LOG_END} {quote(log)}", timeout_s=30).text

    def _emit(self, gate: str, passed: bool, detail: str, evidence: str) -> None:
        want = self.bench.context.want
        self.bench.context.bus.emit(
            GateChecked(want.host_name, want.id, "verify", gate, passed, detail, evidence)
        )
