"""Logging in with keys: identity files, the agent, the default keys. Nothing ever prompts."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployer import errors
from deployer.remote import hostkeys
from deployer.remote.socket import import_paramiko
from deployer.remote.sshconfig import Endpoint

if TYPE_CHECKING:
    import paramiko


@dataclass
class _Attempts:
    """What was offered, for the message when all was refused."""

    refused: list[str]
    unusable: list[str]


def authenticate(transport: paramiko.Transport, endpoint: Endpoint) -> None:
    """Offers the keys of `endpoint` one after the other.

    Raises AuthenticationRefused, ConnectionLost, Unreachable.
    """
    import_paramiko()
    import paramiko

    attempts = _Attempts([], [])
    allowed: list[str] = []
    offered: set[bytes] = set()
    with _keys(endpoint, attempts) as keys:
        for label, key in keys:
            if key.asbytes() in offered:
                continue
            offered.add(key.asbytes())
            try:
                still_wanted = transport.auth_publickey(endpoint.user, key)
            except paramiko.BadAuthenticationType as error:
                allowed = error.allowed_types
                break
            except paramiko.AuthenticationException as error:
                if "timeout" in str(error).lower():
                    raise errors.Unreachable(
                        f"{endpoint.place} gave no answer to the login within "
                        f"{endpoint.connect_timeout_s:g} s",
                        where=endpoint.name,
                        fix="look at the machine's console (PAM, DNS, a full disk can stop sshd)",
                    ) from error
                attempts.refused.append(label)
                if transport.is_active():
                    continue
                attempts.unusable.append("then the host closed the connection (MaxAuthTries?)")
                break
            except (paramiko.SSHException, EOFError, OSError) as error:
                raise errors.ConnectionLost(
                    f"{endpoint.place} ended the connection during the login: {error}",
                    where=endpoint.name,
                    fix="look at sshd's log there (a full disk, PAM), then run again",
                ) from error
            if not still_wanted:
                return
            raise errors.AuthenticationRefused(
                f"{endpoint.user}@{endpoint.place} accepts {label} but asks for "
                f"{' and '.join(still_wanted)} as well, which needs a person",
                where=endpoint.name,
                fix="let this key log in alone (AuthenticationMethods of sshd_config)",
            )
    raise _refused(endpoint, attempts, allowed)


def _refused(
    endpoint: Endpoint, attempts: _Attempts, allowed: Sequence[str]
) -> errors.AuthenticationRefused:
    who = f"{endpoint.user}@{endpoint.place}"
    if allowed:
        what = f"{who} accepts no keys, only: {', '.join(allowed)}"
    elif attempts.refused:
        what = f"{who} refuses every key that was offered: {'; '.join(attempts.refused)}"
    else:
        what = f"no usable key to log in as {who}"
    return errors.AuthenticationRefused(
        what,
        where=endpoint.name,
        fix="add the public key to authorized_keys there, or set `ssh.identity_file` (and "
        "`ssh.user`) in the inventory",
        evidence=tuple(attempts.unusable),
    )


@contextmanager
def _keys(endpoint: Endpoint, attempts: _Attempts) -> Iterator[Iterator[tuple[str, paramiko.PKey]]]:
    """Identity files, then the agent's keys; an encrypted file only through the agent."""
    agents: list[paramiko.Agent] = []

    def held() -> dict[bytes, paramiko.PKey]:
        """Asked only when it is needed: most logins need no agent."""
        if not agents:
            agents.append(_agent(endpoint.connect_timeout_s))
        return {key.asbytes(): key for key in agents[0].get_keys()}

    try:
        yield _offers(endpoint, held, attempts)
    finally:
        for agent in agents:
            agent.close()


def _offers(
    endpoint: Endpoint, held: Callable[[], dict[bytes, paramiko.PKey]], attempts: _Attempts
) -> Iterator[tuple[str, paramiko.PKey]]:
    for path in endpoint.identity_files:
        key, trouble = _load_key(path)
        if key is None and path.exists():
            key = held().get(_public_blob(path))
        if key is not None:
            yield f"{path} ({hostkeys.HostKey(key.get_name(), key.asbytes())})", key
        elif path.exists() or endpoint.missing_identity_is_error:
            attempts.unusable.append(f"{path}: {trouble}")
    if endpoint.use_agent:
        for blob, key in held().items():
            yield f"the agent's {hostkeys.HostKey(key.get_name(), blob)}", key


def _agent(timeout_s: float) -> paramiko.Agent:
    import_paramiko()
    import paramiko

    class BoundedAgent(paramiko.Agent):
        """An agent that does not answer is one without keys."""

        def _connect(self, conn: Any) -> None:
            conn.settimeout(timeout_s)
            try:
                super()._connect(conn)  # type: ignore[misc]
            except (OSError, paramiko.SSHException):
                self.close()

    return BoundedAgent()


_loaded: dict[Path, tuple[tuple[int, int, int], paramiko.PKey]] = {}
_loading = threading.Lock()


def _load_key(path: Path) -> tuple[paramiko.PKey | None, str]:
    """The key of `path`, or why there is none. Read again only when the file changed.

    Loading an RSA key costs 130 ms, each time.
    """
    with _loading:
        try:
            status = path.stat()
        except OSError:
            return _read_key(path)
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            # It may never say anything, and all hosts would wait for it.
            return None, "is no regular file"
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        known = _loaded.get(path)
        if known is not None and known[0] == stamp:
            return known[1], ""
        key, trouble = _read_key(path)
        if key is not None:
            _loaded[path] = (stamp, key)
        return key, trouble


def _read_key(path: Path) -> tuple[paramiko.PKey | None, str]:
    import_paramiko()
    import paramiko
    from paramiko.pkey import UnknownKeyType

    try:
        return paramiko.PKey.from_path(path), ""
    except FileNotFoundError:
        return None, "there is no such file"
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    except (paramiko.PasswordRequiredException, TypeError):
        return None, "is encrypted and not in the agent (ssh-add it)"
    except (paramiko.SSHException, ValueError, UnknownKeyType) as error:
        return None, f"is no usable private key: {error or type(error).__name__}"


def _public_blob(path: Path) -> bytes:
    """The public half of an encrypted key, from the .pub file beside it."""
    try:
        text = path.with_name(path.name + ".pub").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return b""
    lines = hostkeys.parse(f"- {text}", path)
    return lines[0].key.blob if lines else b""
