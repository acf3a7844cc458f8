"""What the server's log of one launch says: the phase, and the effective figures. Incremental.

Feed it only bytes written by this launch. A phase is a hint for the reader of a wait; readiness is
proven elsewhere (our own completion, the pid, the owner of the port).
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from dataclasses import dataclass, field

PHASES = (
    "starting",
    "args",
    "tokenizer",
    "distributed",
    "weights",
    "kv",
    "mamba",
    "graphs",
    "server",
    "warmup",
    "ready",
)
SHARDS = re.compile(
    r"(?:Loading \w+ checkpoint|Multi-thread loading) shards:\s+\d+% Completed \| (\d+)/(\d+)"
)
GRAPHS = re.compile(
    r"(?:Capturing|Compiling) (?:batches|num tokens|prefill shape)[^|]*\|[^|]*\| (\d+)/(\d+)"
)
COMPILING = re.compile(r"DeepGEMM (?:warmup|JIT)|JIT Pre-Compile|\b[Aa]utotun(?:e|ing)\b")
"""Kernels are made, which takes minutes wherever in a start it happens."""
FIGURES = re.compile(r"^\[[^\]]*\] max_total_num_tokens=\d+,")
FIGURE = re.compile(r"\b(max_total_num_tokens|max_running_requests|context_len)=(\d+)")
READY_LINE = re.compile(
    r"^\[[^\]]*\] (?:The server is fired up and ready to roll!"
    r"|Dummy health check server started in background thread at \S+:\d+)\s*$"
)
"""The whole line: a client's text that says the same is logged within another. The second is of a
node that is not the first (0.5.11, utils/common.py), whose schedulers are ready then."""
MEMORY = re.compile(
    r"^\[[^\]\[]*?(?P<rank> [A-Z]{2}\d[^\]]*)?\] Load weight "
    r"(?:begin\. avail mem=(?P<before>[\d.]+)|end\. .*mem usage=(?P<usage>[\d.]+)) GB"
)
CAPTURE = re.compile(
    r"Capture (?:(?:target |draft )?[\w ]*cuda graph|single-CG draft extend) begin", re.IGNORECASE
)
MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("ready", READY_LINE),
    ("warmup", re.compile(r"^(?:\[[^\]]*\] )?INFO: +Uvicorn running on ")),
    ("server", re.compile(r"Started server process \[\d+\]|^\[[^\]]*\] max_total_num_tokens=\d+,")),
    ("graphs", CAPTURE),
    ("mamba", re.compile(r"Mamba Cache is allocated\.")),
    ("kv", re.compile(r"KV Cache (?:is allocated|VA upper bound)\.|Using KV cache dtype")),
    ("weights", re.compile(r"Load weight begin\.")),
    ("distributed", re.compile(r"Init (?:torch distributed|parallel) begin\.")),
    ("tokenizer", re.compile(r"^\[[^\]]*\] (?:Tokenizer|Loading tokenizer|Using default Hugg)")),
    ("args", re.compile(r"server_args=(?:ServerArgs\(|\{)")),
)
"""Of 0.5.9 and 0.5.11, and of 0.5.23, which prints its arguments as a dict (entrypoints/engine.py),
says `Init parallel` (distributed/bootstrap.py) and `VA upper bound` where pools are sized after the
capture (mem_cache/memory_pool.py), and names a captured role: `target verify CUDA graph`
(model_runner_components/cuda_graph_setup.py).
"""
ANY_MARK = re.compile(
    "|".join(f"(?{'i' * bool(mark.flags & re.I)}:{mark.pattern})" for _, mark in MARKS)
)
TAIL_LINES = 5000
"""Eight ranks that die write some 800 lines; the cause is in the first of them."""
MAX_PARTIAL = 1 << 20
MAX_LINE = 16 * 1024
BAR = re.compile(r"\d+%(?: Completed)? ?\|")
COLOUR = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


@dataclass
class LaunchLog:
    """The reader. `phase` only moves forward: the draft model repeats phases of the target."""

    phase: str = "starting"
    shards: tuple[int, int] | None = None
    graphs: tuple[int, int] | None = None
    figures: dict[str, float] = field(default_factory=dict)
    """max_total_num_tokens, max_running_requests, context_len: the effective numbers."""
    stage: tuple[str, int] = ("starting", 0)
    """What is done now, and how often that has changed: a draft model goes through phases again."""
    free_before: dict[str, float] = field(default_factory=dict)
    """GiB free before the target's weights, by rank."""
    weight_use: dict[str, float] = field(default_factory=dict)
    """GiB that the target's weights took, by rank."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), repr=False
    )
    _partial: str = field(default="", repr=False)

    def feed(self, data: bytes) -> bool:
        """Reads the next bytes; True when phase or progress changed."""
        before = (self.phase, self.shards, self.graphs, self.stage)
        pieces = re.split(r"[\r\n]", self._partial + self._decoder.decode(data))
        self._partial = pieces.pop()[-MAX_PARTIAL:]
        for line in pieces:
            self._line(plain(line).rstrip()[:MAX_LINE])
        return before != (self.phase, self.shards, self.graphs, self.stage)

    def text(self) -> str:
        """The last lines, the unfinished one included."""
        return "\n".join([*self.lines, *([self._partial] if self._partial else [])])

    def tail(self, count: int = 15) -> tuple[str, ...]:
        """The last telling lines, progress bars and blanks left out, each cut to 400 characters."""
        told = [line for line in self.text().split("\n") if line.strip() and not is_bar(line)]
        return tuple(line[:400] for line in told[-count:])

    def progress(self) -> tuple[str, float, float, str]:
        """(what, done, total, unit) for a reader; total 0 when the phase has no bar."""
        if self.phase == "weights" and self.shards:
            return "loading weights", *self.shards, "shards"
        if self.phase == "graphs" and self.graphs:
            return "capturing CUDA graphs", *self.graphs, "batches"
        return WORDS[self.phase], float(PHASES.index(self.phase)), float(len(PHASES) - 1), "phases"

    def _line(self, line: str) -> None:
        if not line.strip():
            return
        self.lines.append(line)
        if shards := SHARDS.search(line):
            self._advance("weights")
            self._enter("weights")
            self.shards = (int(shards[1]), int(shards[2]))
            return
        if graphs := GRAPHS.search(line):
            self._advance("graphs")
            self._enter("graphs")
            self.graphs = (int(graphs[1]), int(graphs[2]))
            return
        if COMPILING.search(line):
            self._enter("graphs")
            return
        if FIGURES.match(line):
            self.figures = {name: float(value) for name, value in FIGURE.findall(line)}
        if memory := MEMORY.match(line):
            self._memory(memory)
        if not ANY_MARK.search(line):
            return
        for phase, mark in MARKS:
            if mark.search(line):
                self._advance(phase)
                self._enter(phase)
                return

    def _memory(self, seen: re.Match[str]) -> None:
        """The first of each rank: what comes later is the draft model's."""
        rank = (seen["rank"] or "").strip()
        if seen["before"] is not None:
            self.free_before.setdefault(rank, float(seen["before"]))
        else:
            self.weight_use.setdefault(rank, float(seen["usage"]))

    def _enter(self, phase: str) -> None:
        if self.stage[0] != phase:
            self.stage = (phase, self.stage[1] + 1)

    def _advance(self, phase: str) -> None:
        if PHASES.index(phase) > PHASES.index(self.phase):
            self.phase = phase


def plain(line: str) -> str:
    """The line without colours and without what rotation or a crash leaves in a file."""
    return COLOUR.sub("", line).replace("\x00", "")


WORDS = {
    "starting": "starting",
    "args": "arguments resolved",
    "tokenizer": "loading the tokenizer",
    "distributed": "joining the GPUs",
    "weights": "loading weights",
    "kv": "allocating the KV cache",
    "mamba": "allocating the state cache",
    "graphs": "capturing CUDA graphs",
    "server": "starting the HTTP server",
    "warmup": "warming up",
    "ready": "ready line seen",
}


def is_bar(line: str) -> bool:
    """Is it a progress bar of tqdm?"""
    return "%" in line and "[" in line and bool(BAR.search(line))
