"""Runs the serve agent on the target and reads its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deployer.agents.text import agent_text
from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.remote.transport import Transport
from deployer.shell import quote

Record = dict[str, Any]
PYTHON = (
    'python=$1/bin/python\n[ -x "$python" ] || python=$(command -v python3) || '
    '{ echo "no python3 and no venv at $1" >&2; exit 127; }\n'
)
LOADER = (
    "import sys; n = int(sys.stdin.buffer.readline()); "
    "exec(compile(sys.stdin.buffer.read(n), 'serve_agent', 'exec'), {'__name__': '__main__'})"
)
"""Reads the agent's text, then leaves the rest of stdin (the commands) to it."""


def ask(
    transport: Transport,
    want: Deployment,
    commands: Sequence[Record],
    *,
    timeout_s: float,
    api_key: str = "",
) -> list[Record]:
    """One answer a command. The key travels by stdin. Raises StepFailed when the agent cannot run.

    `timeout_s` bounds the whole exchange.
    """
    source = agent_text().encode()
    settings = {"do": "set", "port": want.port, "api_key": api_key}
    lines = "".join(json.dumps(one) + "\n" for one in [settings, *commands])
    answer = transport.run(
        f'{PYTHON}exec "$python" -I -c {quote(LOADER)}\n',
        args=[want.playbook.engine.venv],
        stdin=b"%d\n" % len(source) + source + lines.encode(),
        timeout_s=timeout_s,
    )
    answers = parse_answers(answer.stdout)
    if answer.exit != 0 or len(answers) != len(commands):
        told = answer.error_text.strip().split("\n")[-3:]
        raise StepFailed(
            f"the agent on {transport.name} ended with exit code {answer.exit}",
            where=want.id,
            fix="see that the venv's Python runs: `deploy up --from venv`",
            evidence=tuple(told),
        )
    for one in answers:
        if not one.get("ok"):
            raise StepFailed(
                f"the agent on {transport.name} failed at {one.get('do')!r}: {one.get('error')}",
                where=want.id,
                fix="this is a bug of the tool; please report it",
            )
    return answers


def parse_answers(stdout: bytes) -> list[Record]:
    """The JSON lines of the agent; other lines are left out."""
    answers: list[Record] = []
    for line in stdout.decode("utf-8", "replace").splitlines():
        if not line.startswith("{"):
            continue
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and "do" in one:
            answers.append(one)
    return answers
