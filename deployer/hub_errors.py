"""What stands between us and the Hub: the library's errors as one of ours, each with its way out.

Pure but for the environment: `huggingface_hub` 2.x takes its proxy from HTTPS_PROXY, HTTP_PROXY,
ALL_PROXY and NO_PROXY and its CA from SSL_CERT_FILE or SSL_CERT_DIR (each in place of the system's
store). REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE mean nothing to it.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from deployer.hub_manifest import HubError
from deployer.names import shown
from deployer.playbook import Playbook

PASSING_STATUS = frozenset({408, 425, 429})
"""With 500 and up: what may be gone at the next try."""

_CREDENTIALS = re.compile(r"://[^/@\s]*@")
_LIMIT_RESET = re.compile(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
_BAD_CA = ("NO_CERTIFICATE_OR_CRL_FOUND", "PEM lib", "NOT_ENOUGH_DATA", "BAD_BASE64_DECODE")


class AccessGated(HubError):
    """The repository is gated and this token (or no token) has no access."""


class RepositoryMissing(HubError):
    """No such repository, a private one that this token may not see, or a disabled one."""


class RevisionMissing(HubError):
    """The repository exists, the revision does not."""


class TokenRefused(HubError):
    """The Hub does not know the token, or the token may not read this."""


class EndpointWrong(HubError):
    """Something answers there that is not a Hub."""


class EndpointUnreachable(HubError):
    """Nothing answers: name, route, refused, proxy, or errors that outlast the retries."""

    exit_code = 3


class CertificateUntrusted(EndpointUnreachable):
    """Its certificate, or the CA file of this machine, is not good."""


class HubSilent(HubError):
    """The Hub took the question and did not answer within the deadline."""

    exit_code = 3


class Unanswered(Exception):
    """One question that was not answered in its time; the next try may be."""


class Doubtful(Exception):
    """An answer that may be right at the next try; `told` is what to say when it never is."""

    def __init__(self, told: HubError) -> None:
        super().__init__(str(told))
        self.told = told


def status_of(error: BaseException) -> int:
    """The HTTP status that an error of the library carries, 0 when none."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0


def passing(error: BaseException) -> bool:
    """True for a failure that may be gone at the next try."""
    if isinstance(error, Unanswered | Doubtful):
        return True
    if isinstance(error, HubError) or _offline(error) or _ca_trouble(error):
        return False
    status = status_of(error)
    if status:
        return status in PASSING_STATUS or status >= 500
    return isinstance(error, OSError) or _is_transport_error(error)


def asked_pause(error: BaseException) -> float:
    """Seconds that the Hub asks to wait (Retry-After, RateLimit); 0.0 when it does not."""
    import email.utils  # with urllib.request below 30 ms that most runs do not need

    headers = _headers(error)
    text = str(headers.get("retry-after", "")).strip()
    if text.isdigit():
        return float(text)
    if text:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except ValueError:
            return 0.0
    found = _LIMIT_RESET.search(str(headers.get("ratelimit", "")))
    return float(found[1]) if found and status_of(error) == 429 else 0.0


def explain(error: BaseException, playbook: Playbook, what: str, *, has_token: bool) -> HubError:
    """The library's error as one of ours, in one line with a way out. `what`: what was asked."""
    repo, endpoint = playbook.model.repo, playbook.download.endpoint
    variable = playbook.download.token_env
    name, status = type(error).__name__, status_of(error)
    text = _CREDENTIALS.sub("://", " ".join(str(error).split()))
    if isinstance(error, HubError):
        return error
    if isinstance(error, Doubtful):
        return error.told
    if isinstance(error, Unanswered) or (
        not status and ("timed out" in text.lower() or "timeout" in name.lower())
    ):
        return HubSilent(
            f"{endpoint} did not answer for {what} of {repo} in time{_through(endpoint)}",
            fix="try again, or set download.endpoint to a mirror",
        )
    if _offline(error):
        return EndpointUnreachable(
            "HF_HUB_OFFLINE is set here, so the Hub is not asked", fix="unset HF_HUB_OFFLINE"
        )
    if trouble := _ca_trouble(error):
        return _untrusted(endpoint, trouble)
    if name == "GatedRepoError":
        return AccessGated(
            f"{repo} is gated and {'this token has' if has_token else 'without a token there is'}"
            " no access",
            fix=f"accept its terms at {endpoint}/{repo} and set {variable} to a token of that user",
        )
    if name == "DisabledRepoError":
        return RepositoryMissing(f"{repo} is disabled at {endpoint}", fix="choose another model")
    if "Invalid credentials" in text or "Invalid user token" in text:
        return TokenRefused(f"{endpoint} does not accept the token", fix=f"renew {variable}")
    # A Hub answers a stranger 401 for what is private and for what does not exist.
    if name == "RepositoryNotFoundError" or (status == 401 and not has_token):
        return _not_found(error, repo, endpoint, variable, has_token)
    if name in ("RevisionNotFoundError", "RevisionResolutionError"):
        return RevisionMissing(
            f"{repo} has no revision {playbook.model.revision!r}", fix="check model.revision"
        )
    if status in (401, 403):
        return TokenRefused(
            f"{endpoint} refused access to {repo} (status {status})",
            fix=f"check {variable}: is the token valid and allowed to read this repository?",
        )
    return _of_the_endpoint(error, endpoint, repo, what, text)


def _not_found(
    error: BaseException, repo: str, endpoint: str, variable: str, has_token: bool
) -> HubError:
    if not _json_speaks(error):
        return EndpointWrong(
            f"{endpoint} does not answer like a Hub (status {status_of(error)})",
            fix="check download.endpoint",
        )
    hint = f"is the token in {variable} one of a user who may see it?"
    if not has_token:
        hint = f"if it is private, set {variable}"
    return RepositoryMissing(
        f"{repo} does not exist at {endpoint} or is not visible to us",
        fix=f"check model.repo; {hint}",
    )


def _of_the_endpoint(
    error: BaseException, endpoint: str, repo: str, what: str, text: str
) -> HubError:
    """What says more about the way to the Hub than about the repository."""
    name, status = type(error).__name__, status_of(error)
    if isinstance(error, ValueError) and not isinstance(error, OSError) and "proxy" in text.lower():
        return EndpointUnreachable(
            f"the proxy setting of this machine cannot be used{_through(endpoint)}",
            fix="write HTTPS_PROXY as http://HOST:PORT, or unset it",
        )
    if status == 404 or (isinstance(error, ValueError | TypeError | KeyError) and not status):
        return EndpointWrong(
            f"{endpoint} does not answer like a Hub ({name})", fix="check download.endpoint"
        )
    if status:
        pause = asked_pause(error)
        asks = f" and asks for a pause of {pause:.0f} s" if pause else ""
        return EndpointUnreachable(
            f"{endpoint} answered {status} for {what} of {repo}, at every try{asks}",
            fix=f"try again {f'in {pause:.0f} s' if pause else 'later'}"
            + ("; with a token the Hub allows more" if status == 429 else ""),
        )
    if isinstance(error, OSError) or _is_transport_error(error):
        return EndpointUnreachable(
            f"{endpoint} cannot be reached{_through(endpoint)}: {text[:200] or name}",
            fix="check download.endpoint, the network and the proxy of this machine",
        )
    return HubError(f"{repo}: {name}: {text[:300]}", fix="check download.endpoint and model.repo")


def _untrusted(endpoint: str, trouble: str) -> CertificateUntrusted:
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        if path := os.environ.get(variable):
            return CertificateUntrusted(
                f"{endpoint}: {trouble}, with {variable}={shown(Path(path))}{_through(endpoint)}",
                fix=f"{variable} replaces the system's CAs: does it hold the one that signs for "
                "this endpoint or your proxy?",
            )
    ignored = [name for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE") if os.environ.get(name)]
    also = f" ({' and '.join(ignored)} are not read)" if ignored else ""
    return CertificateUntrusted(
        f"{endpoint}: {trouble}{_through(endpoint)}",
        fix=f"set SSL_CERT_FILE to a PEM file with the CA of your proxy or Hub{also}",
    )


def _ca_trouble(error: BaseException) -> str:
    """What is wrong with certificates, '' when it is something else."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            why = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
            return f"its certificate is not trusted here ({why or 'verify failed'})"
        if any(word in text for word in _BAD_CA):
            return "the CA file of this machine holds no certificate"
        if isinstance(seen, FileNotFoundError) and os.environ.get("SSL_CERT_FILE"):
            return "the CA file of this machine does not exist"
        seen = seen.__cause__ or seen.__context__
    return ""


def _offline(error: BaseException) -> bool:
    return type(error).__name__ == "OfflineModeIsEnabled"


def _through(endpoint: str) -> str:
    """` (through the proxy of HTTPS_PROXY, http://proxy:3128)`, '' where none is used."""
    import urllib.request

    parts = urllib.parse.urlsplit(endpoint)
    proxies = urllib.request.getproxies_environment()
    for kind in (parts.scheme, "all"):
        if kind in proxies and not urllib.request.proxy_bypass(parts.hostname or ""):
            address = _CREDENTIALS.sub("://", proxies[kind])
            return f" (through the proxy of {kind.upper()}_PROXY, {address})"
    return ""


def _headers(error: BaseException) -> dict[str, str]:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in headers.items()}


def _is_transport_error(error: BaseException) -> bool:
    """The library's HTTP client changed three times: by module, not by class."""
    roots = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(roots & {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})


def _json_speaks(error: BaseException) -> bool:
    """True when the answer behind the error was the Hub's own (it names its error)."""
    headers = _headers(error)
    return bool(headers.get("x-error-code")) or "html" not in headers.get("content-type", "")
