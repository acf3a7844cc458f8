"""Asks the Hub for a model's file list, under deadlines that the library itself does not have.

`huggingface_hub` is imported inside the functions: it costs 280 ms, and most runs need no list.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from deployer.hub_errors import (
    AccessGated,
    CertificateUntrusted,
    Doubtful,
    EndpointUnreachable,
    EndpointWrong,
    HubSilent,
    RepositoryMissing,
    RevisionMissing,
    TokenRefused,
    Unanswered,
    asked_pause,
    explain,
    passing,
    status_of,
)
from deployer.hub_manifest import (
    INDEX,
    HubError,
    IncompleteRepository,
    index_complete,
    manifest_from_info,
    short_config,
)
from deployer.playbook import Playbook
from deployer.state import Manifest, ManifestFile

if TYPE_CHECKING:
    from tenacity import RetryCallState

__all__ = [
    "AccessGated",
    "CertificateUntrusted",
    "EndpointUnreachable",
    "EndpointWrong",
    "HubError",
    "HubSilent",
    "RepositoryMissing",
    "RevisionMissing",
    "TokenRefused",
    "explain",
    "fetch_manifest",
    "fetch_text",
    "passing",
]

DEADLINE_S = 30.0
"""Of all questions and their retries together."""
QUESTION_S = 10.0
"""Of one try of one question."""
TRIES = 4
CONFIG = "config.json"
MOST_CONFIG_BYTES = 4 * 1024 * 1024
MOST_TEXT_BYTES = 64 * 1024 * 1024
"""Of a file that is read here: the index of the largest models has a tenth of it."""

T = TypeVar("T")


def fetch_manifest(
    playbook: Playbook, token: str | None, *, deadline_s: float = DEADLINE_S
) -> Manifest:
    """The pinned file list of the playbook's model; all tries together take `deadline_s` at most.

    Raises a HubError that says which of the ways it failed.
    """
    questions = _Questions(playbook, token, deadline_s)
    model = playbook.model
    questions.ask("the access check", questions.check_access)
    info = questions.ask(
        "the file list",
        lambda: questions.api.model_info(
            model.repo, revision=model.revision, files_metadata=True, timeout=QUESTION_S
        ),
    )
    manifest = manifest_from_info(model.repo, model.revision, info, model.ignore)
    names = [file.path for file in manifest.files]
    if INDEX in names and (lost := index_complete(questions.text(manifest, INDEX), names)):
        raise IncompleteRepository(
            f"{INDEX} names {len(lost)} files that are not in the list: {lost[0]}",
            fix="choose another revision, or shorten model.ignore",
        )
    return manifest.model_copy(update={"config": _config(questions, manifest)})


def _config(questions: _Questions, manifest: Manifest) -> str:
    """What the plan needs to know of the model before anything is downloaded; '' if not known."""
    file = next((file for file in manifest.files if file.path == CONFIG), None)
    if file is None or file.size > MOST_CONFIG_BYTES:
        return ""
    try:
        return short_config(questions.text(manifest, CONFIG))
    except HubError:
        # It only lets the plan speak sooner: the download asks for the same file, and tells why.
        return ""


def fetch_text(
    playbook: Playbook,
    manifest: Manifest,
    path: str,
    token: str | None,
    *,
    deadline_s: float = DEADLINE_S,
) -> str:
    """A small text file of the manifest, its bytes proven by their hash. Raises HubError."""
    return _Questions(playbook, token, deadline_s).text(manifest, path)


class _Questions:
    """Questions about one model that share a deadline; each try has its own too."""

    def __init__(self, playbook: Playbook, token: str | None, deadline_s: float) -> None:
        self.playbook, self.token = playbook, token
        self.deadline_s = deadline_s
        self.end = time.monotonic() + deadline_s
        self.endpoint = playbook.download.endpoint.rstrip("/")
        self._api: Any = None

    @property
    def api(self) -> Any:
        """The library; asked for within a question, for its import can fail like one."""
        if self._api is None:
            from huggingface_hub import HfApi

            # token=False: never the token of the machine that we happen to run on.
            self._api = HfApi(endpoint=self.endpoint, token=self.token or False)
        return self._api

    def ask(self, what: str, question: Callable[[], T]) -> T:
        """The answer, after retries of what passes; a pause that the Hub asks for is kept.

        Raises HubError.
        """
        from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_before_delay

        left = max(0.1, self.end - time.monotonic())
        retrying = Retrying(
            retry=retry_if_exception(passing),
            stop=stop_after_attempt(TRIES) | stop_before_delay(left),
            wait=_pause,
            reraise=True,
        )
        try:
            return retrying(lambda: self._try(question))
        except Exception as error:
            if isinstance(error, HubError):
                raise
            raise explain(error, self.playbook, what, has_token=bool(self.token)) from error

    def check_access(self) -> None:
        """Raises the library's error when this token, or nobody, may read the repository.

        A mirror may lack the route: then the file list decides.
        """
        try:
            self.api.auth_check(self.playbook.model.repo)
        except Exception as error:
            headers = getattr(getattr(error, "response", None), "headers", None) or {}
            if status_of(error) != 404 or headers.get("x-error-code"):
                raise

    def text(self, manifest: Manifest, path: str) -> str:
        """A text file of the manifest, whole and right. Raises HubError."""
        file = next((file for file in manifest.files if file.path == path), None)
        if file is None:
            raise IncompleteRepository(
                f"{manifest.repo} has no {path}", fix="choose another repository or revision"
            )
        if file.size > MOST_TEXT_BYTES:
            raise HubError(
                f"{path} of {manifest.repo} has {file.size} bytes, which no such file needs",
                fix="check the repository",
            )
        return self.ask(path, lambda: self._read(manifest, file))

    def _read(self, manifest: Manifest, file: ManifestFile) -> str:
        from huggingface_hub import hf_hub_url

        # Documented, but not exported as a type checker wants it.
        utils: Any = importlib.import_module("huggingface_hub.utils")
        url = hf_hub_url(manifest.repo, file.path, revision=manifest.commit, endpoint=self.endpoint)
        answer = utils.get_session().get(
            url, headers=utils.build_hf_headers(token=self.token or False), timeout=QUESTION_S
        )
        utils.hf_raise_for_status(answer)
        if not _right(answer.content, file):
            raise Doubtful(
                HubError(
                    f"{self.endpoint} gives other bytes for {file.path} than its list says",
                    fix="check download.endpoint, and the proxy of this machine",
                )
            )
        try:
            return str(answer.content, "utf-8")
        except UnicodeDecodeError as error:
            raise IncompleteRepository(
                f"{file.path} of {manifest.repo} is no text", fix="check the repository"
            ) from error

    def _try(self, question: Callable[[], T]) -> T:
        """One try. Raises Unanswered when its time is over."""
        seconds = min(QUESTION_S, max(0.01, self.end - time.monotonic()))
        try:
            return _within(question, seconds)
        except TimeoutError as error:
            raise Unanswered(f"no answer within {seconds:.0f} s") from error


def _pause(state: RetryCallState) -> float:
    """Seconds before the next try: what the Hub asked for, else longer each time."""
    from tenacity import wait_exponential, wait_random

    error = state.outcome.exception() if state.outcome is not None else None
    asked = asked_pause(error) if error is not None else 0.0
    return asked or wait_exponential(multiplier=0.5, max=5)(state) + wait_random(0, 0.5)(state)


def _right(data: bytes, file: ManifestFile) -> bool:
    """True when these are the bytes that the manifest names."""
    if len(data) != file.size:
        return False
    if file.sha256:
        return hashlib.sha256(data).hexdigest() == file.sha256
    blob = b"blob %d\0" % len(data)
    return hashlib.sha1(blob + data, usedforsecurity=False).hexdigest() == file.blob_id


def _within(work: Callable[[], T], seconds: float) -> T:
    """`work` in a thread of its own; TimeoutError when it is not done in time.

    A daemon thread: the library has calls without any timeout, and a hung one must not keep the
    process alive.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            failed.append(error)

    thread = threading.Thread(target=body, name="hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError
    return done[0]
