"""Asks the Hub for a model's file list, under deadlines that the library itself does not have.

`huggingface_hub` is imported inside the functions: it costs 280 ms, and most runs need no list.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from deployer.hub_manifest import (
    INDEX,
    HubError,
    IncompleteRepository,
    index_complete,
    manifest_from_info,
)
from deployer.playbook import Playbook
from deployer.state import Manifest

DEADLINE_S = 30.0
REQUEST_S = 10.0
TRIES = 4

T = TypeVar("T")


class AccessGated(HubError):
    """The repository is gated and this token (or no token) has no access."""


class RepositoryMissing(HubError):
    """No such repository, or a private one that this token may not see."""


class RevisionMissing(HubError):
    """The repository exists, the revision does not."""


class TokenRefused(HubError):
    """The Hub does not know the token."""


class EndpointWrong(HubError):
    """Something answers there that is not a Hub."""


class EndpointUnreachable(HubError):
    """Nothing answers: name, route, refused, TLS, or errors that outlast the retries."""

    exit_code = 3


class HubSilent(HubError):
    """The Hub took the question and did not answer within the deadline."""

    exit_code = 3


def fetch_manifest(
    playbook: Playbook, token: str | None, *, deadline_s: float = DEADLINE_S
) -> Manifest:
    """The pinned file list of the playbook's model; all tries together take `deadline_s` at most.

    Raises a HubError that says which of the ways it failed.
    """
    return _answered(playbook, token, lambda: _ask(playbook, token), deadline_s)


def fetch_text(
    playbook: Playbook,
    manifest: Manifest,
    path: str,
    token: str | None,
    *,
    deadline_s: float = DEADLINE_S,
) -> str:
    """One small file of the pinned commit, as text. Raises HubError as `fetch_manifest` does."""
    if path not in {file.path for file in manifest.files}:
        raise IncompleteRepository(
            f"{manifest.repo} at {manifest.commit[:12]} has no {path}", fix="check model.repo"
        )

    def ask() -> str:
        return _small(_api(playbook, token), manifest, path).decode("utf-8", "replace")

    return _answered(playbook, token, ask, deadline_s)


def _answered(playbook: Playbook, token: str | None, ask: Callable[[], T], deadline_s: float) -> T:
    """`ask` with retries, within `deadline_s`; every failure is a HubError."""
    repo = playbook.model.repo
    end = time.monotonic() + deadline_s
    try:
        return _within(lambda: _with_retries(ask, end), deadline_s)
    except TimeoutError as error:
        raise HubSilent(
            f"{playbook.download.endpoint} did not answer for {repo} within {deadline_s:.0f} s",
            fix="try again, or set download.endpoint to a mirror",
        ) from error
    except HubError:
        raise
    except Exception as error:
        raise explain(error, playbook, has_token=bool(token)) from error


def _ask(playbook: Playbook, token: str | None) -> Manifest:
    """One try: access, list, index."""
    model = playbook.model
    api = _api(playbook, token)
    api.auth_check(model.repo)
    info = api.model_info(
        model.repo, revision=model.revision, files_metadata=True, timeout=REQUEST_S
    )
    manifest = manifest_from_info(model.repo, model.revision, info, model.ignore)
    names = [file.path for file in manifest.files]
    if INDEX in names and (lost := index_complete(_small(api, manifest, INDEX), names)):
        raise IncompleteRepository(
            f"{INDEX} names {len(lost)} files that are not in the list: {lost[0]}",
            fix="choose another revision, or shorten model.ignore",
        )
    return manifest


def _api(playbook: Playbook, token: str | None) -> Any:
    from huggingface_hub import HfApi

    # token=False: never the token of the machine that we happen to run on.
    return HfApi(endpoint=playbook.download.endpoint.rstrip("/"), token=token or False)


def _small(api: Any, manifest: Manifest, name: str) -> bytes:
    """One small file, the weight index for instance: read before any shard is."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(prefix="deployer-hub-") as folder:
        path = api.hf_hub_download(manifest.repo, name, revision=manifest.commit, local_dir=folder)
        return Path(path).read_bytes()


def _with_retries(work: Callable[[], T], end: float) -> T:
    """Runs `work` up to TRIES times while the failure is one that passes."""
    from tenacity import (
        Retrying,
        retry_if_exception,
        stop_after_attempt,
        stop_after_delay,
        wait_exponential,
        wait_random,
    )

    retrying = Retrying(
        retry=retry_if_exception(passing),
        stop=stop_after_attempt(TRIES) | stop_after_delay(max(0.1, end - time.monotonic())),
        wait=wait_exponential(multiplier=0.5, max=5) + wait_random(0, 0.5),
        reraise=True,
    )
    return retrying(work)


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


def status_of(error: BaseException) -> int:
    """The HTTP status that an error of the library carries, 0 when none."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0


def passing(error: BaseException) -> bool:
    """True for a failure that may be gone at the next try."""
    if isinstance(error, HubError):
        return False
    status = status_of(error)
    if status:
        return status in (408, 425, 429) or status >= 500
    return isinstance(error, OSError) or _is_transport_error(error)


def _is_transport_error(error: BaseException) -> bool:
    """The library's HTTP client changed three times: by module, not by class."""
    roots = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(roots & {"httpx", "httpx2", "httpcore", "requests", "urllib3"})


def explain(error: Exception, playbook: Playbook, *, has_token: bool) -> HubError:
    """The library's error as one of ours, in one line with a way out."""
    repo, endpoint = playbook.model.repo, playbook.download.endpoint
    variable = playbook.download.token_env
    name, status = type(error).__name__, status_of(error)
    text = " ".join(str(error).split())
    if name == "GatedRepoError":
        return AccessGated(
            f"{repo} is gated and {'this token has' if has_token else 'without a token there is'}"
            " no access",
            fix=f"accept its terms at {endpoint}/{repo} and set {variable} to a token of that user",
        )
    if "Invalid credentials" in text or "Invalid user token" in text:
        return TokenRefused(f"{endpoint} does not accept the token", fix=f"renew {variable}")
    if name == "RepositoryNotFoundError" and not _json_speaks(error):
        return EndpointWrong(
            f"{endpoint} does not answer like a Hub (status {status})",
            fix="check download.endpoint",
        )
    if name == "RepositoryNotFoundError":
        hint = "" if has_token else f"; if it is private, set {variable}"
        return RepositoryMissing(
            f"{repo} does not exist at {endpoint} or is not visible to us",
            fix=f"check model.repo{hint}",
        )
    if name in ("RevisionNotFoundError", "RevisionResolutionError"):
        return RevisionMissing(
            f"{repo} has no revision {playbook.model.revision!r}", fix="check model.revision"
        )
    if status in (401, 403):
        return TokenRefused(
            f"{endpoint} refused access to {repo} (status {status})",
            fix=f"check {variable}: is the token valid and allowed to read this repository?",
        )
    if status == 404 or (isinstance(error, ValueError) and not isinstance(error, OSError)):
        return EndpointWrong(
            f"{endpoint} does not answer like a Hub ({name})", fix="check download.endpoint"
        )
    if status:
        return EndpointUnreachable(
            f"{endpoint} answered {status} for {repo}, {TRIES} times", fix="try again later"
        )
    if "timed out" in text.lower() or "timeout" in name.lower():
        return HubSilent(
            f"{endpoint} did not answer for {repo} in time",
            fix="try again, or set download.endpoint to a mirror",
        )
    if isinstance(error, OSError) or _is_transport_error(error):
        return EndpointUnreachable(
            f"{endpoint} cannot be reached: {text[:200] or name}",
            fix="check download.endpoint, the network and the proxy of this machine",
        )
    return HubError(f"{repo}: {name}: {text[:300]}", fix="check download.endpoint and model.repo")


def _json_speaks(error: Exception) -> bool:
    """True when the answer behind the error was the Hub's own (it names its error)."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    kind = str(headers.get("content-type", "")).lower()
    return bool(headers.get("x-error-code")) or "html" not in kind
