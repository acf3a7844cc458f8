"""What the compatibility rules look at, and what they answer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deployer.playbook import ArgValue
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.releases import Version
from deployer.sglang.serveflags import token_count

HYBRID_TYPES = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_text"})
SPECULATIVE = frozenset({"NEXTN", "EAGLE", "EAGLE3"})
LATEST: Version = (9999,)


@dataclass(frozen=True)
class Problem:
    """One reason not to launch. `change` is what to write in the playbook instead."""

    rule: str
    reason: str
    change: str
    source: str


@dataclass(frozen=True)
class Case:
    """What a rule looks at. What is not known is None or empty, and then speaks for the launch."""

    version: Version
    args: Mapping[str, ArgValue]
    model_type: str | None = None
    driver: Version | None = None
    shape: ModelShape | None = None
    capabilities: tuple[Version, ...] = ()
    """Compute capability of each GPU, (8, 6)."""
    glibc: Version | None = None
    """Of the machine that the engine runs on."""
    python: Version | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    """The engine lock: distribution name (normalised) -> version."""
    env: Mapping[str, str] = field(default_factory=dict)

    def text(self, *names: str) -> str:
        """The value of the first of these flags that is set, as text."""
        return next((str(self.args[name]) for name in names if name in self.args), "")

    def count(self, *names: str) -> int | None:
        """The value of the first of these flags that is set, as a count; None when it is none."""
        try:
            return token_count(self.text(*names))
        except ValueError:
            return None

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.count("tp-size", "tensor-parallel-size", "tp") or 1

    @property
    def speculative(self) -> bool:
        """Does it ask for a draft that verifies against the target's recurrent state?"""
        return self.text("speculative-algorithm", "speculative-algo").upper() in SPECULATIVE

    @property
    def hybrid(self) -> bool:
        """Is it a model with gated-delta-net layers?"""
        return self.model_type in HYBRID_TYPES

    @property
    def extra_buffer(self) -> bool:
        """Is the mamba state kept in the strategy that speculation with a radix cache needs?"""
        return self.text("mamba-scheduler-strategy") == "extra_buffer"

    @property
    def radix_cache(self) -> bool:
        """Is the prefix cache on (SGLang's default)?"""
        return not self.args.get("disable-radix-cache", False)


@dataclass(frozen=True)
class Rule:
    """`applies` decides; versions are inclusive on both ends."""

    name: str
    first: Version
    last: Version
    applies: Callable[[Case], bool]
    reason: str
    change: str
    source: str


Check = Callable[[Case], list[Problem]]
"""A rule whose words depend on the case."""
