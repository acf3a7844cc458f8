"""Child of the engine's own Python: huggingface_hub with hf_xet, into .deployer/hf.

Runs in another Python than the rest of the agent, with its packages. It never unwinds: an exception
or an orderly end inside huggingface_hub deletes the bytes of every file that is under way, so this
process ends by os._exit, or is killed. What it leaves is taken over by the supervisor.
"""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH118

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import json
import os
import queue
import re
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from deployer.agents.fetch.common import (
    DENIED,
    DISK_ERROR,
    DISK_FULL,
    GAVE_UP,
    NOT_FOUND,
    Fatal,
    log,
    make_folder,
)
from deployer.agents.fetch.gauge import Reporter
from deployer.agents.fetch.hubhttp import origin
from deployer.agents.fetch.manifest import File, Job
from deployer.agents.fetch.stock import HF, HF_CACHE, Stock, below, occupied

CHUNK = 1 << 20
"""huggingface_hub writes 10 MiB at a time by itself: that is how much a kill would lose."""
TRIES = 3
MOST_WORKERS = 4
_PARTIAL = re.compile(r"(.*\.)([0-9a-f]{8})\.incomplete\Z")
_SIGNED = re.compile(r"(https?://[^\s?]+)\?[^\s.]\S*")
_CODES = {
    "GatedRepoError": DENIED,
    "RepositoryNotFoundError": NOT_FOUND,
    "RevisionNotFoundError": NOT_FOUND,
    "EntryNotFoundError": NOT_FOUND,
    "RemoteEntryNotFoundError": NOT_FOUND,
}


class Counter:
    """Bytes that came over the network, from all threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.received = self.retries = 0

    def add(self, count: int) -> None:
        with self.lock:
            self.received += max(0, count)


def silent_bar(counter: Counter) -> type:
    """A progress bar class that huggingface_hub feeds and nobody sees.

    It makes two bars a file with Xet: what came over the network, and what was put together of it.
    """

    class Bar:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.iterable = args[0] if args else kwargs.get("iterable")
            self.total, self.n = kwargs.get("total"), 0
            self.counts = "econstruct" not in str(kwargs.get("desc") or "")
            self.format_dict: dict[str, Any] = {"rate": None}

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            if self.counts:
                counter.add(int(count or 0))

        def __iter__(self) -> Any:
            return iter(self.iterable or ())

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            return None

        def __getattr__(self, name: str) -> Callable[..., None]:
            if name.startswith("__") or name == "update_transfer":
                raise AttributeError(name)
            return lambda *args, **kwargs: None  # set_description, refresh, close, ...

    return Bar


def code_of(error: BaseException, endpoint: str) -> int:
    """The exit code for what huggingface_hub raised.

    A refusal denies the files only when the Hub itself gives it: that of another origin is one of
    a signed url, as after its time.
    """
    seen: BaseException | None = error
    while seen is not None:
        for kind in type(seen).__mro__:
            if kind.__name__ in _CODES:
                return _CODES[kind.__name__]
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return DISK_FULL
        if isinstance(seen, OSError) and seen.errno in (errno.EROFS, errno.EACCES, errno.EIO):
            return DISK_ERROR
        response = getattr(seen, "response", None)
        if getattr(response, "status_code", None) in (401, 403):
            asked = str(getattr(response, "url", "") or endpoint)
            return DENIED if origin(asked) == origin(endpoint) else GAVE_UP
        seen = seen.__cause__ or seen.__context__
    return GAVE_UP


def one_line(error: BaseException) -> str:
    """An error as one line of at most 300 characters, without what signs an url."""
    text = _SIGNED.sub(r"\1?...", " ".join(f"{type(error).__name__}: {error}".split()))
    return "".join(c for c in text if c.isprintable())[:300]


class Fetch:
    """The files that are still missing, each fetched whole by huggingface_hub."""

    def __init__(self, job: Job, token: str) -> None:
        self.job, self.token = job, token
        self.counter = Counter()
        self.stock = Stock(job.path, job.files)
        self.local = os.path.join(job.path, HF)
        self.queue: queue.SimpleQueue[File] = queue.SimpleQueue()
        self.failure: Fatal | None = None
        self.kept: set[str] = set()

    def run(self, tell: Callable[[str], None]) -> int:
        """0: all files came. Raises Fatal."""
        hub: Any = importlib.import_module("huggingface_hub")
        constants: Any = importlib.import_module("huggingface_hub.constants")
        constants.DOWNLOAD_CHUNK_SIZE = CHUNK
        make_folder(self.job.path, self.local)
        wanted = self.wanted()
        self.make_room(wanted)
        for file in wanted:
            self.queue.put(file)
        threads = [
            threading.Thread(target=self.work, args=(hub,), daemon=True)
            for _ in range(max(1, min(self.job.connections, MOST_WORKERS, len(wanted))))
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.keep_partials()
            tell(json.dumps(self.row()))
            if self.failure is not None and self.failure.code != GAVE_UP:
                raise self.failure
            for thread in threads:
                thread.join(1.0 / len(threads))
        tell(json.dumps(self.row()))
        if self.failure is not None:
            raise self.failure
        return 0

    def wanted(self) -> list[File]:
        """Small files first, then what we have least of: those with a long prefix may be spared."""
        left = self.stock.look()
        return sorted(left, key=lambda f: (f.size >= CHUNK, self.stock.held(f) - f.size))

    def make_room(self, wanted: list[File]) -> None:
        """Its files come beside what we have of them. Raises Fatal when there is no room."""
        facts = os.statvfs(self.job.path)
        free = facts.f_bavail * facts.f_frsize
        need = sum(file.size for file in wanted)
        if free < need:
            text = f"it would need {need} bytes beside what is there, and {free} are free"
            raise Fatal(GAVE_UP, text)

    def row(self) -> dict[str, Any]:
        """The progress figures; how much is on the disk is the supervisor's own knowledge."""
        received = self.counter.received
        return {
            "received": received,
            "moved": received,
            "retries": self.counter.retries,
            "phase": "downloading" if received else "metadata",
        }

    def work(self, hub: Any) -> None:
        while self.failure is None:
            try:
                file = self.queue.get_nowait()
            except queue.Empty:
                return
            try:
                self.fetch(hub, file)
            except Fatal as error:
                self.failure = self.failure or error
            except Exception as error:  # noqa: BLE001 - a worker's bug must end the job, named
                traceback.print_exc()
                self.failure = self.failure or Fatal(GAVE_UP, f"{file.path}: {one_line(error)}")

    def fetch(self, hub: Any, file: File) -> None:
        """One file, with a few tries. Raises Fatal."""
        words: dict[str, Any] = {
            "repo_id": self.job.repo,
            "filename": file.path,
            "revision": self.job.commit,
            "local_dir": self.local,
            "token": self.token or False,
            "endpoint": self.job.endpoint,
            "etag_timeout": 15,
        }
        known = inspect.signature(hub.hf_hub_download).parameters
        if "tqdm_class" in known:
            words["tqdm_class"] = silent_bar(self.counter)
        for count in range(1, TRIES + 1):
            try:
                hub.hf_hub_download(**words)
                return
            except Exception as error:
                code = code_of(error, self.job.endpoint)
                text = f"{file.path}: {one_line(error)}"
                # Its next try would begin at 0; other methods go on from what is there.
                begun = max(map(occupied, self.stock.hf_partials(file)), default=0) >= CHUNK
                if code != GAVE_UP or begun or count == TRIES or self.failure is not None:
                    raise Fatal(code, text) from error
                self.counter.retries += 1
                log(f"{text}; trying again")

    def keep_partials(self) -> None:
        """A second name for every partial file: huggingface_hub unlinks its own on any error."""
        for path in list(below(os.path.join(self.job.path, HF_CACHE))):
            found = _PARTIAL.fullmatch(path)
            if not found or path in self.kept:
                continue
            twin = f"{found[1]}{int(found[2], 16) ^ 0xFFFFFFFF:08x}.incomplete"
            with contextlib.suppress(OSError):  # gone already, or no hard links here
                os.link(path, twin)
            self.kept.update((path, twin))


def child(job: Job, token: str) -> int:
    """Mode `hf-child`: never returns, so that nothing is unwound."""
    reporter = Reporter.here()
    code = DISK_ERROR
    try:
        reporter.tell(json.dumps({"phase": "starting"}))
        code = Fetch(job, token).run(reporter.tell)
    except Fatal as error:
        code = error.code
        if not reporter.fail(error):
            log(f"error: {error}")
    except BaseException:  # noqa: BLE001 - whatever it is, nothing may unwind
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
