"""The result file: JSON for programs, and the same for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(folder: Path, name: str, result: Mapping[str, Any]) -> list[Path]:
    """Writes NAME.json and NAME.md; both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    text.write_text("\n".join(lines(result)) + "\n")
    return [data, text]


def lines(result: Mapping[str, Any]) -> list[str]:
    """Markdown."""
    versions = result["versions"]
    told = [scene for scene in result["scenes"] if not scene["skipped"]]
    out = [
        f"# Real SGLang {versions['sglang']} on {result['gpu']['name']}, {result['date']}",
        "",
        f"Made by `tests/gpu/run.py` at commit {result['commit']}; driver "
        f"{result['gpu']['driver']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, sglang-kernel {versions['sglang-kernel']}, Python "
        f"{result['machine']['python']}. {result['seconds']:.0f} s in all. "
        f"{result['gpus']} GPU(s) there. {sum(scene['ok'] for scene in told)} of {len(told)} "
        "scenes as expected.",
        "",
        *(f"- {line}" for line in result["limits"]),
    ]
    if remarks := result.get("remarks"):
        out += ["", "Remarks, added by hand:", "", *(f"- {line}" for line in remarks)]
    for scene in result["scenes"]:
        if scene["skipped"]:
            out += ["", f"## {scene['name']}: left out", "", scene["skipped"]]
            continue
        verdict = "as expected" if scene["ok"] else "NOT AS EXPECTED"
        out += ["", f"## {scene['name']}: {verdict}", ""]
        out += ["| expected | seen | |", "| --- | --- | --- |"]
        for check in scene["checks"]:
            mark = "yes" if check["ok"] else "**no**"
            out.append(f"| {check['what']} | {_short(check['seen'])} | {mark} |")
        for run in scene["runs"]:
            out.append("")
            out.append(f"`{run['command']}`: exit {run['exit']}, {run['seconds']} s")
            out += [f"- {gate['gate']}: {'ok' if gate['passed'] else 'FAIL'}, {gate['detail']}"
                    for gate in run.get("gates", [])]  # fmt: skip
            out += [f"- note: {note}" for note in run.get("notes", [])]
            if run.get("summary"):
                out.append(f"- end: {run['summary']}")
        for name, figures in scene["figures"].items():
            if name.startswith("plan_"):
                out += ["", *_plan(name.removeprefix("plan_"), figures)]
    return out


def _plan(variant: str, figures: Mapping[str, Any]) -> list[str]:
    early, late = figures["planned_before"], figures["planned_with_measured_free"]
    off, left = figures["error_percent_before"], figures["error_percent_with_measured_free"]
    out = [
        f"Plan against actual, variant {variant}:",
        "",
        "| | planned before | actual | error % | planned with the log's free memory | error % |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, actual in figures["actual"].items():
        cells = [early.get(name, ""), actual, off.get(name, ""), late.get(name, ""),
                 left.get(name, "")]  # fmt: skip
        out.append(f"| {name} | " + " | ".join(str(cell) for cell in cells) + " |")
    return out


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= 160 else text[:157] + "..."
