"""What one key of a playbook says about another: folders, addresses, arguments. Pure."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Sequence

from deployer.crosscheck_nodes import check_nodes
from deployer.crosscheck_twin import refuse_twin
from deployer.document import Document
from deployer.names import listed
from deployer.playbook import FIELD_OF_FLAG, SECRET_FLAGS, Download, Playbook
from deployer.yamltree import At

SYSTEM_FOLDERS = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr")
)
"""First part of paths that belong to the operating system."""
_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def check_playbook(document: Document, playbook: Playbook) -> None:
    """The references within one playbook. Raises DocumentError."""
    names = [variant.name for variant in playbook.variants]
    for index in range(len(names)):
        refuse_twin(document, ("variants",), names, index, ("variants", index, "name"))
    package = playbook.driver.package
    at: At = ("driver", "package")
    if package is not None:
        sources = {"url": package.url, "file": package.file, "local": package.local}
        named = [name for name, value in sources.items() if value is not None]
        if len(named) != 1:
            raise document.error(
                at,
                "driver.package: expected one of `url`, `file` and `local`, found "
                + (" and ".join(named) or "none"),
                fix="keep one of the three",
                key=True,
            )
        if package.url is not None and not re.match(r"https?://[^/\s]+/\S+$", package.url):
            raise document.error(
                (*at, "url"),
                f"{document.name((*at, 'url'))}: expected the URL of a .run file, "
                f"found {package.url}",
                fix="write scheme, host and path",
            )
        if package.proxy is not None and (wrong := _not_an_endpoint(package.proxy, ("http",))):
            raise document.error(
                (*at, "proxy"),
                f"{document.name((*at, 'proxy'))}: expected a URL like http://proxy:3128, {wrong}",
                fix="write scheme, host and :port",
            )
    if package is None and playbook.driver.packages == [] and playbook.driver.install != "never":
        raise document.error(
            ("driver", "install"),
            f"driver.install is {playbook.driver.install}, but there is no driver.package",
            fix="add `package:` with `url:`, `file:` or `local:`, and `sha256:`, or write "
            "`install: never`",
        )
    _check_folder(document, ("model", "path"), playbook.model.path)
    _check_folder(document, ("engine", "venv"), playbook.engine.venv)
    _check_urls(document, playbook)
    _check_download(document, playbook.download)
    _check_flags(document, ("serve", "args"), playbook.serve.args)
    for index, variant in enumerate(playbook.variants):
        _check_flags(document, ("variants", index, "args"), variant.args)
    if playbook.nodes is not None:
        check_nodes(document, playbook, playbook.nodes)


def _check_folder(document: Document, at: At, path: str) -> None:
    """A folder that is filled and cleaned must be one of its own, never the system's."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or len(parts) < 2 or parts[0] in SYSTEM_FOLDERS:
        raise document.error(
            at,
            f"{document.name(at)}: expected a folder of its own, found {path}",
            fix="name one below a data folder, for example /srv/models/NAME or /opt/NAME/venv",
        )


def _check_urls(document: Document, playbook: Playbook) -> None:
    """No password in an URL that plans, command lines and run records show."""
    urls: list[tuple[At, str | None]] = [
        (("download", "endpoint"), playbook.download.endpoint),
        (("download", "target_endpoint"), playbook.download.target_endpoint),
        (("download", "proxy"), playbook.download.proxy),
    ]
    mirrors = playbook.download.mirrors
    urls += [(("download", "mirrors", index), mirror) for index, mirror in enumerate(mirrors)]
    if playbook.driver.package is not None:
        urls.append((("driver", "package", "url"), playbook.driver.package.url))
        urls.append((("driver", "package", "proxy"), playbook.driver.package.proxy))
    links = playbook.engine.find_links
    urls += [(("engine", "find_links", index), link) for index, link in enumerate(links)]
    for at, url in urls:
        if url is not None and _PASSWORD.search(url):
            raise document.error(
                at,
                f"{document.name(at)}: the URL has a password, which plans and records would show",
                fix="leave it out; use a mirror that needs none, or a file on the target",
            )


def _check_download(document: Document, download: Download) -> None:
    """Methods are listed once and one can be used; addresses are http(s) ones without extras."""
    at: At = ("download",)
    for index in range(len(download.methods)):
        refuse_twin(document, (*at, "methods"), download.methods, index, (*at, "methods", index))
    for index in range(len(download.mirrors)):
        refuse_twin(document, (*at, "mirrors"), download.mirrors, index, (*at, "mirrors", index))
    lacking = {"mirror": not download.mirrors, "peer": download.peer is None}
    if all(lacking.get(method, False) for method in download.methods):
        raise document.error(
            (*at, "methods"),
            f"{document.name((*at, 'methods'))}: none of {listed(download.methods)} can be used: "
            "`mirror` needs download.mirrors, `peer` needs download.peer",
            fix="add `range`, or what the method needs",
        )
    urls: list[tuple[At, str | None]] = [
        ((*at, "endpoint"), download.endpoint),
        ((*at, "target_endpoint"), download.target_endpoint),
        *(((*at, "mirrors", index), url) for index, url in enumerate(download.mirrors)),
    ]
    for place, url in urls:
        if url is not None and (wrong := _not_an_endpoint(url, ("http", "https"))):
            raise document.error(
                place,
                f"{document.name(place)}: expected a URL like https://hub.example, {wrong}",
                fix="write scheme, host and, where needed, :port and path",
            )
    if download.proxy is not None and (wrong := _not_an_endpoint(download.proxy, ("http",))):
        raise document.error(
            (*at, "proxy"),
            f"{document.name((*at, 'proxy'))}: expected a URL like http://proxy.example:3128, "
            + wrong,
            fix="write scheme, host and :port; only http proxies are spoken to",
        )
    if download.peer is not None and ".." in download.peer.path.split("/"):
        place = (*at, "peer", "path")
        raise document.error(
            place,
            f"{document.name(place)}: expected a path without `..`, found {download.peer.path}",
            fix="write the folder's own path",
        )


def _not_an_endpoint(url: str, schemes: Sequence[str]) -> str:
    """What is wrong with it as the base of requests; '' when nothing is."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"found {url}: {error}"
    if parts.scheme not in schemes or not host or url != "".join(url.split()):
        return f"found {url}"
    if parts.query or parts.fragment:
        return f"found a query or a fragment in {url}"
    return ""


def _check_flags(document: Document, at: At, flags: Iterable[str]) -> None:
    """No flag with a field of its own, and none that would show a secret."""
    for flag in flags:
        place = (*at, flag)
        if flag in SECRET_FLAGS:
            raise document.error(
                place,
                f"{document.name(place)}: a secret may not stand on a command line",
                fix="leave it out; the API key of clients is named by serve.api_key_env",
                key=True,
            )
        if field := FIELD_OF_FLAG.get(flag):
            raise document.error(
                place,
                f"{document.name(place)}: expected it as {field}, found it among the arguments",
                fix=f"write it as {field}, without the flag",
                key=True,
            )
