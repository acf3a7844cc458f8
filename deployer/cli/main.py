"""The `deploy` command: parses words, sets the exit code. Command modules load when they run.

`deploy --help` must start fast: this module imports click and nothing of ours but the version.
"""

from __future__ import annotations

import importlib
import signal
import sys
from types import FrameType

import click

from deployer import __version__
from deployer.cli.streams import OutputLost, end_by_pipe, take_over

COMMANDS = {
    "init": "Look at a machine that no inventory names, and write its inventory file.",
    "up": "Bring hosts or deployments to a proven endpoint.",
    "plan": "Show what `up` would do; change nothing.",
    "verify": "Run the gates again on a running server.",
    "down": "Stop the deployment's server, and prove that it is gone.",
    "restart": "Stop the server, launch it again, and run the gates.",
    "rollback": "Go back to the last known-good launch, or to a named one.",
    "migrate": "Move a served model to another host: prove it there, then move the traffic.",
    "status": "Show hosts, GPUs, deployments and launches as observed now.",
    "logs": "Print the current launch's log; -f follows it across rotation.",
    "history": "List launches with variant, figures and verdict.",
    "fit": "Say what a playbook's server will effectively run, and where the memory goes.",
    "doctor": "Look at everything, worst problem first, with the action for it.",
    "explain": "Say what an SGLang log file shows: phase, cause, action. Offline.",
    "judge": "Say whether a model's answer (JSON) is good text. Offline.",
    "gc": "Show what old builds, weights and launches take up, and free it.",
    "unlock": "Release a host lock that a dead run left behind.",
    "trust": "Record a host's SSH key after you have compared its fingerprint.",
    "help": "Explain a topic: inventory, playbook, lock, migrate, exit-codes.",
}

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class LazyGroup(click.Group):
    """Lists commands from a table; imports `deployer.cli.<name>` only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of the module `deployer.cli.<name>`."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"deployer.cli.{cmd_name}")
        command: click.Command = module.command
        command.context_settings = {**CONTEXT, **command.context_settings}
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's; a misspelt command gets the nearest one."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            from deployer.names import did_you_mean

            ctx.fail(f"there is no command `{args[0]}`{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the table without loading the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.option(
    "-i",
    "--inventory",
    metavar="DIR",
    envvar="DEPLOY_INVENTORY",
    default=None,
    help="Inventory folder (default: inventory/; also DEPLOY_INVENTORY).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--jsonl", is_flag=True, help="The event stream as JSON lines on stdout.")
@click.option("--yes", is_flag=True, help="Do not ask before changing something.")
@click.option(
    "-v", "--verbose", is_flag=True, help="More detail; a traceback for unexpected errors."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    default=None,
    help="Deadline of the whole command.",
)
@click.version_option(__version__, prog_name="deploy")
@click.pass_context
def group(
    ctx: click.Context,
    inventory: str | None,
    as_json: bool,
    jsonl: bool,
    yes: bool,
    verbose: bool,
    timeout: float | None,
) -> None:
    """From a bare GPU box to a proven-good LLM endpoint over SSH.

    deploy up kpro5 brings all deployments of host kpro5 up; kpro5/qwen is one of them.
    """
    ctx.obj = {
        "inventory": inventory,
        "as_json": as_json,
        "jsonl": jsonl,
        "yes": yes,
        "verbose": verbose,
        "timeout": timeout,
    }


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(signum).name)


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        # The terminal is gone. Not so under nohup, which has it ignored.
        signal.signal(signal.SIGHUP, _terminated)
    take_over()
    verbose = any(word in ("-v", "--verbose") for word in sys.argv[1:])
    try:
        code = _ended(verbose)
        sys.stdout.flush()
    except OutputLost as error:
        code = 1
        _say(
            f"deploy: stdout cannot be written: {error.strerror}",
            "free space, or send it elsewhere",
        )
        sys.stdout = None
    except BrokenPipeError:
        end_by_pipe()
    sys.exit(code)


def _ended(verbose: bool) -> int:
    """Runs the command; its exit code. Raises BrokenPipeError when its output goes nowhere."""
    try:
        code = group.main(prog_name="deploy", standalone_mode=False)
    except click.ClickException as error:
        _misused(error)
        return 2
    except (click.exceptions.Abort, KeyboardInterrupt):
        _say("deploy: interrupted", "run the same command again; it continues where it was")
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the top level turns every error into a code
        return _failed(error, verbose)
    return code if isinstance(code, int) else 0


def _failed(error: Exception, verbose: bool) -> int:
    from deployer.errors import DeployError

    if isinstance(error, DeployError):
        from deployer.cli.report import print_error

        print_error(error)
        return error.exit_code
    if verbose:
        import traceback

        traceback.print_exc()
    _say(
        f"deploy: unexpected {type(error).__name__}: {error}",
        "this is a defect of deploy; run again with -v and report the traceback",
    )
    return 1


def _misused(error: click.ClickException) -> None:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else "deploy"
    _say(f"deploy: {error.format_message().rstrip('.')}", f"see `{command} --help`")


def _say(what: str, fix: str) -> None:
    click.echo(what, err=True)
    click.echo(f"  -> {fix}", err=True)
