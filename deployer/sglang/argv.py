"""The server's command line, built from a deployment. Pure; nothing is looked up."""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.playbook import FIELD_OF_FLAG, SECRET_FLAGS, ArgValue

API_KEY_ENV = "DEPLOYER_API_KEY"
"""The variable of the server's process that holds the API key (a secret of the job)."""

WITH_API_KEY = (
    "import os, runpy, sys; "
    f"sys.argv[1:] += ['--api-key', os.environ.pop('{API_KEY_ENV}')]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)
"""SGLang takes its key on argv only, where `ps` shows it. This runs the same module as
`python -m sglang.launch_server` but adds the key inside the process, from the environment."""


def server_argv(want: Deployment, variant: str | None = None) -> list[str]:
    """SGLang's own arguments, without the interpreter; the API key is never among them.

    Raises ValueError for a flag that has its own field in the playbook, or that shows a secret;
    the catalog has refused such a playbook before.
    """
    argv = [
        *("--model-path", want.playbook.model.path),
        *("--served-model-name", want.playbook.model.served_name),
        *("--host", want.playbook.serve.host),
        *("--port", str(want.port)),
    ]
    for flag, value in want.serve_args(variant).items():
        if flag in FIELD_OF_FLAG or flag in SECRET_FLAGS:
            raise ValueError(f"serve.args.{flag}: may not stand among the arguments")
        argv += _flag(flag, value)
    return argv


def command(want: Deployment, argv: list[str]) -> list[str]:
    """The whole command: the venv's interpreter, the module, `argv`."""
    python = f"{want.playbook.engine.venv}/bin/python"
    if want.playbook.serve.api_key_env:
        return [python, "-c", WITH_API_KEY, *argv]
    return [python, "-m", "sglang.launch_server", *argv]


def _flag(flag: str, value: ArgValue) -> list[str]:
    if value is True:
        return [f"--{flag}"]
    if value is False:
        return []
    text = str(value)
    # argparse takes a value that begins with a dash for a flag unless it is joined by "=".
    return [f"--{flag}={text}"] if text.startswith("-") else [f"--{flag}", text]
