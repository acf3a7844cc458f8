"""The serve agent as one text that a Python on the target runs from its stdin.

No file is written there: the modules are made in memory, in the order in which they need each
other. The quick proof of a no-op `up` sends only the first few of them.
"""

from __future__ import annotations

import functools
from importlib import resources

PACKAGES = ("deployer", "deployer.agents", "deployer.agents.serve")
LIGHT = ("processes", "web", "chat", "main")
FULL = (*LIGHT, "figures", "load", "stop", "drain", "leftovers", "weights", "full")
_MAKER = """\
import sys, types
def _module(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    if source is None:
        module.__path__ = []
    else:
        exec(compile(source, name, "exec"), module.__dict__)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
"""


@functools.cache
def agent_text(*, light: bool = False) -> str:
    """The agent's source; with `light` it knows the command `light` alone."""
    folder = resources.files("deployer.agents").joinpath("serve")
    lines = [_MAKER + "\n".join(f"_module({name!r}, None)" for name in PACKAGES)]
    for name in LIGHT if light else FULL:
        source = folder.joinpath(f"{name}.py").read_text(encoding="utf-8")
        lines.append(f"_module('{PACKAGES[-1]}.{name}', {source!r})")
    table = "main.LIGHT" if light else "full.FULL"
    lines.append(f"sys.modules['{PACKAGES[-1]}.main'].serve(deployer_agents.{table})")
    lines.insert(-1, f"deployer_agents = sys.modules['{PACKAGES[-1]}']")
    return "\n".join(lines) + "\n"
