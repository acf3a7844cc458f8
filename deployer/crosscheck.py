"""What one key says about another: GPUs and containers that exist, ports that do not clash.

Pure: a parsed file and its model in, DocumentError out. A model alone cannot see these.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence

from deployer.deployment import Deployment
from deployer.document import Document
from deployer.errors import DocumentError, UsageError
from deployer.inventory import Container, Host
from deployer.names import did_you_mean, listed
from deployer.playbook import (
    DIST_PORTS,
    FIELD_OF_FLAG,
    NODE_FLAGS,
    SECRET_FLAGS,
    ArgValue,
    Download,
    Playbook,
)
from deployer.yamltree import At

SYSTEM_FOLDERS = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr")
)
"""First part of paths that belong to the operating system."""
_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def check_host(document: Document, name: str, host: Host) -> None:
    """The references within one host. Raises DocumentError for the first that is wrong."""
    at: At = ("hosts", name)
    if host.kind == "plain" and host.containers:
        raise document.error(
            (*at, "containers"),
            f"hosts.{name} is a plain host and has no containers",
            fix="remove `containers:`, or write `kind: proxmox`",
            key=True,
        )
    addresses = [gpu.address for gpu in host.gpus]
    for index, address in enumerate(addresses):
        place = (*at, "gpus", index, "address")
        if not address.endswith(".0"):
            raise document.error(
                place,
                f"{document.name(place)}: expected function 0 of a GPU, found {address}",
                fix=f"write {address[:-1]}0; its other functions are found on the host",
            )
        _refuse_twin(document, (*at, "gpus"), addresses, index, (*at, "gpus", index, "address"))
    for vmid, container in host.containers.items():
        _check_gpus(
            document, (*at, "containers", vmid, "gpus"), container.gpus, addresses, f"host {name}"
        )
        _check_create(document, (*at, "containers", vmid), container)
    for label, entry in host.deployments.items():
        place = (*at, "deployments", label)
        wanted = addresses
        owner = f"host {name}"
        if entry.container is not None:
            container_entry = host.containers.get(entry.container)
            if container_entry is None:
                near = did_you_mean(str(entry.container), host.containers)
                raise document.error(
                    (*place, "container"),
                    f"{document.name(place)} names container {entry.container}, which hosts.{name} "
                    f"does not have{near}",
                    fix=f"containers of {name}: {listed(host.containers)}",
                )
            if container_entry.gpus is not None:
                wanted, owner = container_entry.gpus, f"container {entry.container}"
        _check_gpus(document, (*place, "gpus"), entry.gpus, wanted, owner)
    check_ports(
        document,
        name,
        ((label, d.container, d.port) for label, d in host.deployments.items() if d.port),
    )


def _check_create(document: Document, at: At, container: Container) -> None:
    create = container.create
    if create is None:
        return
    if container.ssh is not None and create.ssh_public_key_file is None:
        raise document.error(
            (*at, "create"),
            f"{document.name(at)} is reached by ssh, but its `create` names no key for it",
            fix="add `ssh_public_key_file:`, or leave out `ssh` to go through `pct exec`",
            key=True,
        )
    net = create.net
    if net.gateway is not None and net.ip == "dhcp":
        raise document.error(
            (*at, "create", "net", "gateway"),
            f"{document.name((*at, 'create', 'net'))} has a gateway, but its address is dhcp",
            fix="remove `gateway:`, or write `ip:` with a prefix",
        )


def check_ports(document: Document, host: str, used: Iterable[tuple[str, int | None, int]]) -> None:
    """`used` is (deployment, container, port); two of one container on a port are an error."""
    first: dict[tuple[int | None, int], str] = {}
    for label, vmid, port in used:
        other = first.setdefault((vmid, port), label)
        if other != label:
            at: At = ("hosts", host, "deployments", label)
            place = f"container {vmid}" if vmid is not None else f"host {host}"
            raise document.error(
                (*at, "port"),
                f"{document.name(at)} and {other} both listen on port {port} of {place}",
                fix=f"give {label} a `port:` of its own",
            )


def check_playbook(document: Document, playbook: Playbook) -> None:
    """The references within one playbook. Raises DocumentError."""
    names = [variant.name for variant in playbook.variants]
    for index in range(len(names)):
        _refuse_twin(document, ("variants",), names, index, ("variants", index, "name"))
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
        _check_nodes(document, playbook, playbook.nodes)


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
        _refuse_twin(document, (*at, "methods"), download.methods, index, (*at, "methods", index))
    for index in range(len(download.mirrors)):
        _refuse_twin(document, (*at, "mirrors"), download.mirrors, index, (*at, "mirrors", index))
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


def _check_nodes(document: Document, playbook: Playbook, nodes: Sequence[str]) -> None:
    """At least two hosts, each once; arguments that so many can share."""
    at: At = ("nodes",)
    if len(nodes) < 2:
        raise document.error(
            at,
            f"nodes: expected at least two hosts, found {len(nodes)}",
            fix="leave the key out for a model that one host serves",
            key=True,
        )
    for index in range(len(nodes)):
        _refuse_twin(document, at, nodes, index, (*at, index))
    groups: list[tuple[At, dict[str, ArgValue]]] = [(("serve", "args"), playbook.serve.args)]
    groups += [
        (("variants", index, "args"), one.args) for index, one in enumerate(playbook.variants)
    ]
    for place, args in groups:
        for flag in args:
            if flag in NODE_FLAGS:
                raise document.error(
                    (*place, flag),
                    f"{document.name((*place, flag))}: `nodes` sets it",
                    fix="leave it out; the port is serve.dist_port",
                    key=True,
                )
        # As ServerArgs.check_server_args asks for, SGLang 0.5.11.
        size = _size({**playbook.serve.args, **args})
        if size is not None and size % len(nodes):
            raise document.error(
                place,
                f"tp-size x pp-size is {size}, which {len(nodes)} nodes cannot share",
                fix=f"choose a multiple of {len(nodes)}",
                key=True,
            )
    _check_dist_port(document, ("serve", "dist_port"), playbook, playbook.serve.port)


def _check_dist_port(document: Document, at: At, playbook: Playbook, port: int) -> None:
    first = playbook.serve.dist_port
    if first <= port < first + DIST_PORTS:
        raise document.error(
            at,
            f"port {port} of the server is one of {first} to {first + DIST_PORTS - 1}, which the "
            "nodes use among themselves",
            fix="choose another serve.dist_port",
        )


def _size(args: Mapping[str, ArgValue]) -> int | None:
    """tp-size x pp-size; None when they are no numbers, which the server's own parser tells."""
    found = 1
    for names in (("tp-size", "tp", "tensor-parallel-size"), ("pp-size", "pipeline-parallel-size")):
        value = next((args[name] for name in names if name in args), 1)
        if isinstance(value, bool) or not str(value).isdigit():
            return None
        found *= int(value)
    return found


def check_node(deployment: Deployment, document: Document) -> None:
    """What a node's own entry may not say. Raises DocumentError."""
    at: At = ("hosts", deployment.host_name, "deployments", deployment.name)
    entry = deployment.entry
    for key, value in (("replica", entry.replica), ("cutover", entry.cutover)):
        if value is not None:
            raise document.error(
                (*at, key),
                f"{document.name((*at, key))}: {deployment.id} is one of the nodes of playbook "
                f"{deployment.playbook_name}, which are no replicas and do not migrate",
                fix=f"leave `{key}:` out",
                key=True,
            )
    if entry.port is not None:
        _check_dist_port(document, (*at, "port"), deployment.playbook, entry.port)


def refuse_nodes(deployments: Iterable[Deployment], what: str) -> None:
    """Raises UsageError when one of them is a node of a server, which `what` cannot do."""
    for want in deployments:
        if want.node is not None:
            raise UsageError(
                f"{what} is not for a server of several nodes, and {want.id} is one of them",
                fix=f"`deploy up {want.id}` with the playbook as it shall be",
            )


def check_variant(deployment: Deployment, document: Document) -> None:
    """The variant that the inventory names must be one of the playbook's."""
    names = [variant.name for variant in deployment.playbook.variants]
    variant = deployment.entry.variant
    if variant is not None and variant not in names:
        raise document.error(
            ("hosts", deployment.host_name, "deployments", deployment.name, "variant"),
            f"{deployment.id}: playbook {deployment.playbook_name} has no variant "
            f"`{variant}`{did_you_mean(variant, names)}",
            fix=f"variants of {deployment.playbook_name}: {listed(names)}",
        )


def _check_gpus(
    document: Document, at: At, gpus: Sequence[str] | None, known: Sequence[str], owner: str
) -> None:
    """Each GPU is one of the owner's, and listed once; an empty list is a mistake."""
    if gpus is None:
        return
    if not gpus:
        raise document.error(
            at,
            f"{document.name(at)} is an empty list",
            fix=f"name GPUs, or leave the key out for all of {owner}",
        )
    for index, address in enumerate(gpus):
        if address not in known:
            raise document.error(
                (*at, index),
                f"{document.name((*at, index))}: {owner} has no GPU {address}"
                f"{did_you_mean(address, known)}",
                fix=f"GPUs of {owner}: {listed(known)}",
            )
        _refuse_twin(document, at, gpus, index, (*at, index))


def _refuse_twin(document: Document, at: At, values: Sequence[str], index: int, place: At) -> None:
    if values[index] in values[:index]:
        first = document.position((*at, values.index(values[index])))
        raise _twin(document, place, values[index], first.line)


def _twin(document: Document, place: At, value: str, line: int) -> DocumentError:
    return document.error(
        place,
        f"{document.name(place)}: {value} is listed twice; it stands at line {line} already",
        fix="remove one of the two",
    )
