"""The record that every run leaves: its whole event stream, as JSON lines."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

from deployer.errors import DeployError
from deployer.events import Event, RunFinished
from deployer.names import shown
from deployer.state_file import make_folder


def new_run_id() -> str:
    """Sortable and unique: 20261130-065012-ab12."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


class RunRecord:
    """The event stream of a run as a file: .deploy/runs/<time>-<host>.jsonl."""

    def __init__(self, folder: Path, run_id: str, host: str) -> None:
        """Makes the file. Raises DeployError when it cannot be written."""
        self.path = folder / f"{run_id}-{host}.jsonl"
        self._lost = False
        try:
            make_folder(folder)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error

    def __call__(self, event: Event) -> None:
        """Appends one event. Raises DeployError, once: the events of that error come here too.

        Nor does the end of a run that has failed raise: how it failed is what is to be told.
        """
        if self._lost:
            return
        line = json.dumps(event.to_dict(), ensure_ascii=False, default=str) + "\n"
        try:
            self._file.write(line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._lost = True
            if not (isinstance(event, RunFinished) and event.exit_code):
                raise self._unwritable(error) from error

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def _unwritable(self, error: OSError) -> DeployError:
        return DeployError(
            f"the record of the run cannot be written: {error.strerror or error}",
            where=shown(self.path),
            fix="free space or correct the permissions, then run the same command again",
        )
