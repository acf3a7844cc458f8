"""Hashing many files at once, with all cores: hashlib lets go of the interpreter's lock."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from deployer.agents.fetch.common import Fatal, Stopped
from deployer.agents.fetch.gauge import Gauge, Reporter
from deployer.agents.fetch.manifest import File


class Hashers:
    """Calls `judge` for every file, largest first, from one thread a core.

    Tells the progress once a second. `goes_on` raises Stopped once a thread has failed.
    """

    def __init__(self, gauge: Gauge, reporter: Reporter) -> None:
        self.gauge, self.reporter = gauge, reporter
        self.stopped = threading.Event()
        self.errors: list[Fatal] = []

    def goes_on(self) -> None:
        """Raises Stopped."""
        if self.stopped.is_set():
            raise Stopped

    def run(self, files: list[File], judge: Callable[[File], None]) -> None:
        """Raises the first Fatal of `judge`."""
        queue = deque(sorted(files, key=lambda file: -file.size))

        def work() -> None:
            while not self.stopped.is_set():
                try:
                    file = queue.popleft()
                except IndexError:
                    return
                try:
                    judge(file)
                except Stopped:
                    return
                except Fatal as error:
                    self.errors.append(error)
                    self.stopped.set()
                except Exception as error:  # noqa: BLE001 - a thread's bug must end the job, named
                    self.errors.append(Fatal(1, f"{file.path}: {type(error).__name__}: {error}"))
                    self.stopped.set()

        count = min(len(os.sched_getaffinity(0)), len(files))
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                self.reporter.tell(self.gauge.line())
                thread.join(1.0)
        self.reporter.tell(self.gauge.line())
        if self.errors:
            raise self.errors[0]
