"""Which release's arithmetic a SGLang version has. Pure.

Read and compared: the functions that size pools (model_executor/pool_configurator.py and
model_runner_kv_cache_mixin.py, since 0.5.16 mem_cache/kv_cache_configurator.py) and those that
resolve the flags (server_args.py, arg_groups/) of every release from 0.5.9 to 0.5.23.
"""

from __future__ import annotations

import re
from enum import IntEnum


class Engine(IntEnum):
    """Releases whose arithmetic differs; each stands for itself and those up to the next."""

    V0_5_9 = 9
    V0_5_10 = 10
    V0_5_11 = 11
    """Of 0.5.12 too."""
    V0_5_13 = 13
    """Shares the states as 0.5.14 does, under the flags of 0.5.11."""
    V0_5_14 = 14
    V0_5_15 = 15
    """Another backend captures the prefill; graphs that are off take nothing."""
    V0_5_16 = 16
    """It captures some vision models' prefill."""
    V0_5_17 = 17
    """A padding slot; a given context no longer bounds what is captured."""
    V0_5_18 = 18
    """Of 0.5.19 too."""
    V0_5_20 = 20
    """Of 0.5.21 too."""
    V0_5_22 = 22
    """Captured batches are no larger than the requests asked for."""
    V0_5_23 = 23


SAME = {12: Engine.V0_5_11, 19: Engine.V0_5_18, 21: Engine.V0_5_20}
"""Releases that were read and compute as an older one."""


def engine_of(version: str) -> tuple[Engine, str]:
    """The arithmetic for this version, and a warning ("" when this very version was read)."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
    patch = numbers[2] if len(numbers) == 3 and numbers[:2] == (0, 5) else None
    if patch is None:
        patch = 0 if numbers < (0, 5, 9) else 10**6
    known = [engine for engine in Engine if engine <= patch]
    engine = known[-1] if known else Engine.V0_5_9
    if patch == engine or SAME.get(patch) == engine:
        return engine, ""
    return engine, f"SGLang {version} was not read: computed as 0.5.{int(engine)}"
