"""`python -m sglang.launch_server`."""

from __future__ import annotations

import os
import sys
import warnings

from sglang.lookalike import deaths, faults, process, replay
from sglang.version import RELEASE

if __name__ == "__main__":
    if replay.wanted():
        replay.play(sys.argv[1:])
    if faults.SILENT_DEATH in faults.active() or deaths.PREFIX + "died-silent" in faults.active():
        os._exit(3)
    if RELEASE >= (0, 5, 11):
        warnings.warn(
            "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the "
            "recommended entrypoint.\n  Example: sglang serve --model-path <model> [options]",
            stacklevel=1,
        )
    deaths.strike_parent(deaths.IMPORT)
    deaths.strike_parent(deaths.ARGPARSE)
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(sys.argv[1:])
    deaths.strike_parent(deaths.ARGS, server_args)
    from sglang.srt.entrypoints.http_server import launch_server

    try:
        launch_server(server_args)
    finally:
        process.kill_tree(include_self=False)
