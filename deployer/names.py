"""Names and patterns that a user types, their plain words, near misses, and the sample files.

Standard library only, so that `deploy help` answers without loading anything heavy.
"""

from __future__ import annotations

import difflib
import fnmatch
import ipaddress
import re
import urllib.parse
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

HOST_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
PCI_ADDRESS = r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$"
PCI_ID = r"^[0-9a-f]{4}:[0-9a-f]{4}$"
ABSOLUTE_PATH = r"^/[^\x00-\x1f\x7f]*$"
LINE = r"^[^\x00-\x1f\x7f]+$"
"""Text of one line: no control characters, not empty."""
ENV_VALUE = r"^[^\x00\n\r]*$"
ADDRESS = r"^[A-Za-z0-9_\[:][A-Za-z0-9_.:%\[\]-]*$"
"""A host name, an IP address or a name of ~/.ssh/config; never an option of ssh."""
GATEWAY = r"^[A-Za-z0-9_\[:][A-Za-z0-9_.:%\[\]@,-]*$"
CIDR = r"^[0-9A-Fa-f.:]{3,45}/\d{1,3}$"
NET_KEY = r"^net\d{1,2}$"
USER = r"^[a-z_][a-z0-9_.-]*\$?$"
PLAYBOOK_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
FLAG_NAME = r"^[a-z0-9][a-z0-9-]*$"
VARIANT_NAME = r"^[a-z0-9][a-z0-9._-]*$"
SHA256 = r"^[0-9a-f]{64}$"
APT_PIN = r"^[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?=[A-Za-z0-9.+:~-]+$"
TEMPLATE = r"^[A-Za-z][A-Za-z0-9._-]*:vztmpl/[A-Za-z0-9][A-Za-z0-9._+-]*$"
STORAGE = r"^[A-Za-z][A-Za-z0-9._-]*$"
BRIDGE = r"^[A-Za-z][A-Za-z0-9._-]{0,14}$"
CONTAINER_FEATURE = r"^(nesting|keyctl|fuse|mknod)=[01]$"
CONTAINER_HOST_NAME = r"^[A-Za-z0-9]+(-+[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-+[A-Za-z0-9]+)*)*$"
IP_OR_DHCP = r"^(dhcp|[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2})$"
IP = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$"
REPO = r"^[A-Za-z0-9][\w.-]*/[\w.-]+$"
DRIVER_VERSION = r"^\d+(\.\d+)+$"
ENGINE_VERSION = r"^\d+(\.\d+)*([a-z0-9.]+)?$"
PYTHON_VERSION = r"^3\.\d+$"
UV_VERSION = r"^[0-9.<>=!~, *]+$"
_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
HTTP_URL = rf"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:{_PORT})?(/[A-Za-z0-9._~/%-]*)?$"
"""Without a user, a query or a fragment: it is shown, and paths are added to it."""

PLAIN_WORDS: dict[str, str] = {
    HOST_NAME: "a name of lower-case letters, digits and inner dashes (at most 63)",
    PCI_ADDRESS: "a PCI address like 0000:21:00.0",
    PCI_ID: "a PCI id like 10de:2230 (vendor:device, lower-case hex)",
    ABSOLUTE_PATH: "an absolute path like /srv/models, without control characters",
    LINE: "one line of text without control characters",
    ENV_VALUE: "text without line breaks",
    ADDRESS: "a host name or an IP address",
    GATEWAY: "a gateway like root@192.0.2.1:22",
    CIDR: "an address with its prefix length, like 192.0.2.50/24",
    NET_KEY: "a network key of `pct config`, like net1",
    USER: "a user name like root",
    PLAYBOOK_NAME: "the name of a file of the playbook folder, without .yaml",
    ENV_NAME: "the name of an environment variable like HF_TOKEN",
    FLAG_NAME: "a flag name without leading dashes, like tp-size",
    VARIANT_NAME: "a variant name of lower-case letters, digits, dots, dashes",
    APT_PIN: "a package with its exact version, like nvidia-driver=580.126.09-1",
    SHA256: "a sha256 of 64 lower-case hex digits",
    TEMPLATE: "a template like local:vztmpl/debian-12-standard_12.7-1_amd64.tar.zst",
    STORAGE: "the name of a Proxmox storage, like local-zfs",
    BRIDGE: "the name of a network bridge, like vmbr0",
    CONTAINER_FEATURE: "a feature like nesting=1",
    CONTAINER_HOST_NAME: "a host name of letters, digits and inner dashes",
    IP_OR_DHCP: "dhcp, or an IPv4 address with its prefix like 192.0.2.129/24",
    IP: "an IPv4 address like 192.0.2.1",
    REPO: "a Hub id like Qwen/Qwen3.6-27B",
    DRIVER_VERSION: 'a driver version like "580.126.09"',
    ENGINE_VERSION: 'a version like "0.5.11"',
    PYTHON_VERSION: 'a Python version like "3.12"',
    UV_VERSION: 'a version range like ">=0.5"',
    HTTP_URL: "a URL like http://192.0.2.5:30000, without user, query and blanks",
}
"""What each pattern means to a reader; every pattern of the models stands here (tested)."""

_TOPICS = {
    "inventory": ("inventory", ".yaml"),
    "playbook": ("playbooks", ".yaml"),
    "lock": ("playbooks/locks", ".txt"),
}


def did_you_mean(word: str, options: Iterable[object]) -> str:
    """`; did you mean `gpus`?` for the nearest of `options`, or an empty string."""
    known = {str(option).lower(): str(option) for option in options}
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean `{known[near[0]]}`?" if near else ""


def listed(options: Iterable[object], limit: int = 12) -> str:
    """`a, b, c`, cut after `limit` entries; `none` when there are none."""
    words = [str(option) for option in options]
    rest = len(words) - limit
    return (", ".join(words[:limit]) or "none") + (f" and {rest} more" if rest > 0 else "")


def parts_of(patterns: Iterable[str]) -> list[str]:
    """Each pattern by itself: they may be joined by commas and blanks."""
    return [part for pattern in patterns for part in re.split(r"[,\s]+", pattern) if part]


def in_url(address: str) -> str:
    """An address as it stands in a URL: one of IPv6 in brackets."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def like(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Is one of `names` like one of `patterns` (`*`, `?`), and none like one with a `!` before it?

    Patterns may be joined, see `parts_of`. With nothing but `!` patterns, all others are meant.
    """
    every = parts_of(patterns)
    known = list(names)
    wanted = [part for part in every if not part.startswith("!")]
    unwanted = [part[1:] for part in every if part.startswith("!")]

    def found(among: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, part) for part in among for name in known)

    return (found(wanted) or not wanted) and not found(unwanted)


def shown(path: Path) -> str:
    """`path` as a user would type it: relative when it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def help_text(topic: Literal["inventory", "playbook", "lock"]) -> str:
    """The commented sample files of `topic`, each under a line with its name.

    All but the first are comments, so that the whole is one valid file. Raises KeyError for another
    topic, FileNotFoundError when the installation lacks its samples.
    """
    folder, ending = _TOPICS[topic]
    files = _samples(folder, ending)
    if not files:
        raise FileNotFoundError(f"this installation has no sample files for {topic}")
    parts: list[str] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if parts:
            text = "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
        parts.append(f"# ---- {folder}/{file.name} ----\n{text}")
    return "\n".join(parts)


def _samples(folder: str, ending: str) -> list[Traversable]:
    """The sample files: inside the package of a wheel, beside it in a checkout."""
    roots: tuple[Traversable, ...] = (
        resources.files("deployer") / "samples",
        Path(__file__).resolve().parent.parent,
    )
    for root in roots:
        place = root / folder
        if place.is_dir():
            files = [file for file in place.iterdir() if file.name.endswith(ending)]
            return sorted(files, key=lambda file: file.name)
    return []


def same_url(one: str, other: str) -> bool:
    """Do both name the same server? http:// and the scheme's port may be left out."""
    return plain_url(one) == plain_url(other)


def plain_url(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and path, alike for all ways to write the same URL."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        # No URL at all: who asks for it is told so; here it is equal to itself only.
        return "", text, 0, ""
    return parts.scheme, plain_host(parts.hostname or ""), port, parts.path.rstrip("/")


def plain_host(host: str) -> str:
    """In lower case; an IP address in its one short form."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def is_loopback(url: str) -> bool:
    """Is it another server on each machine?"""
    host = plain_url(url)[1]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
