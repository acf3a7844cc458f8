"""Types and formats of container keys in the lab, and the texts of what does not fit.

Learned from recorded runs of pve-container 6.1.10; no code of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

BOOLEANS = {"console", "debug", "onboot", "protection", "template", "unprivileged"}
INTEGERS = {"cores": 1, "cpuunits": 0, "memory": 16, "snaptime": 0, "swap": 0, "tty": 0}
"""With their least values."""
STRINGS = {
    "arch",
    "cmode",
    "cpulimit",
    "description",
    "entrypoint",
    "env",
    "features",
    "hookscript",
    "hostname",
    "lock",
    "nameserver",
    "ostype",
    "parent",
    "rootfs",
    "searchdomain",
    "startup",
    "tags",
    "timezone",
}
LOCKS = (
    "backup",
    "create",
    "destroyed",
    "disk",
    "fstrim",
    "migrate",
    "mounted",
    "rollback",
    "snapshot",
    "snapshot-delete",
)
_NUMBERED = re.compile(r"^(dev|mp|net|unused)(0|[1-9]\d*)$", re.ASCII)
_LIMITS = {"dev": 256, "mp": 256, "net": 32, "unused": 256}
_NET_KEYS = (
    "name bridge hwaddr ip gw ip6 gw6 firewall tag trunks mtu rate type link_down host-managed"
).split()
_TRUE = re.compile(r"^(1|on|yes|true)$", re.IGNORECASE)
_FALSE = re.compile(r"^(0|off|no|false)$", re.IGNORECASE)
_NOT_IN_SCHEMA = (
    "property is not defined in schema and the schema does not allow additional properties"
)
_VOLUME = re.compile(r"^[a-z][a-z0-9\-_.]*[a-z0-9]:.+$", re.IGNORECASE)

_DEPRECATED = {
    "lxc.aa_profile": "lxc.apparmor.profile",
    "lxc.aa_allow_incomplete": "lxc.apparmor.allow_incomplete",
    "lxc.console": "lxc.console.path",
    "lxc.devttydir": "lxc.devtty.dir",
    "lxc.haltsignal": "lxc.signal.halt",
    "lxc.rebootsignal": "lxc.signal.reboot",
    "lxc.stopsignal": "lxc.signal.stop",
    "lxc.id_map": "lxc.idmap",
    "lxc.init_cmd": "lxc.init.cmd",
    "lxc.init_uid": "lxc.init.uid",
    "lxc.init_gid": "lxc.init.gid",
    "lxc.logfile": "lxc.log.file",
    "lxc.loglevel": "lxc.log.level",
    "lxc.mount": "lxc.mount.fstab",
    "lxc.pts": "lxc.pty.max",
    "lxc.se_context": "lxc.selinux.context",
    "lxc.seccomp": "lxc.seccomp.profile",
    "lxc.syslog": "lxc.log.syslog",
    "lxc.tty": "lxc.tty.max",
    "lxc.utsname": "lxc.uts.name",
}
_RAW_KEYS = {
    f"lxc.{word}"
    for word in """
apparmor.profile apparmor.allow_incomplete apparmor.allow_nesting apparmor.raw selinux.context
include arch uts.name signal.halt signal.reboot signal.stop init.cmd init.cwd init.uid init.gid
pty.max console.logfile console.path tty.max devtty.dir hook.autodev autodev kmsg mount.fstab
mount.entry mount.auto rootfs.mount cap.drop cap.keep seccomp.profile seccomp.notify.proxy
seccomp.notify.cookie idmap hook.pre-start hook.pre-mount hook.mount hook.start hook.stop
hook.post-stop hook.clone hook.destroy hook.version log.level log.file start.auto start.delay
start.order group environment environment.runtime environment.hooks sysctl monitor.unshare
""".split()
}


@dataclass(frozen=True)
class RawVerdict:
    """Whether pct keeps a raw line, and what it says."""

    kept: bool
    warning: str = ""


def raw_key(key: str) -> RawVerdict:
    """What pct does with a raw lxc.* key."""
    if key in _RAW_KEYS or key.startswith(("lxc.cgroup2.", "lxc.prlimit.", "lxc.net.")):
        return RawVerdict(True)
    if key.startswith("lxc.cgroup."):
        return RawVerdict(True, f"{key} is deprecated, this will be a hard error in the future!")
    if key in _DEPRECATED:
        return RawVerdict(True, f"{key} is deprecated and was renamed to {_DEPRECATED[key]}")
    for old, new in (("limit", "prlimit"), ("network", "net")):
        if key.startswith(f"lxc.{old}."):
            return RawVerdict(True, f"{key}: lxc.{old}.* was renamed to lxc.{new}.*")
    if key == "lxc.rootfs.path":
        return RawVerdict(False, f"{key}: lxc.rootfs.path is auto generated from rootfs")
    if key == "lxc.rootfs.options":
        return RawVerdict(
            False,
            f"{key}: lxc.rootfs.options is not supported, please use mount point options in the "
            '"rootfs" key',
        )
    return RawVerdict(False)


def decoded(text: str) -> str:
    """A description line: percent codes and bytes (latin-1 here) are one UTF-8 text."""
    return unquote_to_bytes(text.encode("latin-1")).decode("utf-8", "replace")


def encoded(text: str) -> str:
    """As pct writes a description: UTF-8; controls, non-ASCII, `%` and `:` as percent codes."""
    return "".join(
        chr(byte) if 32 <= byte <= 126 and byte not in b"%:" else f"%{byte:02X}"
        for byte in text.encode("utf-8")
    )


def known(key: str) -> bool:
    """Whether the schema has this key."""
    numbered = _NUMBERED.match(key)
    if numbered:
        return int(numbered[2]) < _LIMITS[numbered[1]]
    return key in BOOLEANS or key in INTEGERS or key in STRINGS


def typed(key: str, value: str) -> tuple[str, str]:
    """The value as pct keeps it when it reads the file, and its complaint ('' for none)."""
    if not known(key):
        return value, f"unknown setting '{key}'"
    if key in BOOLEANS:
        if _TRUE.match(value) or _FALSE.match(value):
            return ("1" if _TRUE.match(value) else "0"), ""
        return value, f"type check ('boolean') failed - got '{value}'"
    if key in INTEGERS:
        if re.fullmatch(r"[0-9]+", value):
            return str(int(value)), ""
        return value, f"type check ('integer') failed - got '{value}'"
    error = format_error(key, value)
    if isinstance(error, dict):
        # A message that ends a line of its own (a nested format) leaves a blank line.
        return value, "format error\n" + "\n".join(f"{k}: {v}" for k, v in error.items()) + (
            "\n" if any(v.endswith("\n") for v in error.values()) else ""
        )
    return value, error


def format_error(key: str, value: str) -> str | dict[str, str]:
    """What is wrong with a value of a format: '' for nothing, or sub-key -> message."""
    kind = key.rstrip("0123456789") if _NUMBERED.match(key) else key
    if kind == "dev":
        return property_string(
            value,
            "path",
            {
                "path": _device_path,
                "uid": _natural,
                "gid": _natural,
                "mode": _mode,
                "deny-write": _boolean,
            },
        )
    if kind == "features":
        return property_string(
            value,
            "",
            {
                "nesting": _boolean,
                "keyctl": _boolean,
                "fuse": _boolean,
                "mknod": _boolean,
                "force_rw_sys": _boolean,
                "mount": _any,
            },
        )
    if kind == "mp":
        free = dict.fromkeys(
            "volume size ro shared backup quota acl replicate mountoptions idmap keepattrs".split(),
            _any,
        )
        return property_string(value, "volume", {**free, "mp": _mount_path}, ("mp",))
    if kind == "net":
        return property_string(
            value,
            "",
            dict.fromkeys(_NET_KEYS, _any),
            ("name",),
        )
    if kind == "hostname":
        label = r"[a-zA-Z0-9]([a-zA-Z0-9\-]*[a-zA-Z0-9])?"
        return (
            ""
            if re.fullmatch(rf"({label}\.)*{label}", value)
            else "value does not look like a valid DNS name"
        )
    if kind == "hookscript":
        return "" if _VOLUME.match(value) else f"unable to parse volume ID '{value}'"
    if kind == "tags":
        tags = [tag for tag in re.split(r"[,;\s]+", value) if tag]
        bad = [tag for tag in tags if not re.fullmatch(r"[a-z0-9_][a-z0-9_\-+.]*", tag, re.I)]
        return "invalid characters in tag" if bad else ""
    return ""


def property_string(value, default, checks, needed=()):  # type: ignore[no-untyped-def]
    """`default,key=value,...`: '' when it fits, a text, or sub-key -> message."""
    found: dict[str, str] = {}
    for part in value.split(","):
        if part == "":
            continue
        name, equals, rest = part.partition("=")
        if not equals:
            if not default:
                return "value without key, but schema does not define a default key"
            name, rest = default, part
        if name in found:
            return f"duplicate key in comma-separated list property: {name}"
        found[name] = rest
    errors = {}
    for name, rest in found.items():
        if name not in checks:
            errors[name] = _NOT_IN_SCHEMA
        elif text := checks[name](rest):
            errors[name] = text
    for name in needed:
        if name not in found:
            errors[name] = "property is missing and it is not optional"
    return errors or ""


def device(value: str) -> tuple[str, dict[str, str]]:
    """The path ('' for none) and the sub-keys of a devN value that fits its format."""
    path, options = "", {}
    for part in value.split(","):
        name, equals, rest = part.partition("=")
        if not equals:
            path = part
        elif name == "path":
            path = rest
        else:
            options[name] = rest
    return path, options


def _any(text: str) -> str:
    return ""


def _boolean(text: str) -> str:
    return (
        ""
        if _TRUE.match(text) or _FALSE.match(text)
        else f"type check ('boolean') failed - got '{text}'"
    )


def _natural(text: str) -> str:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        return f"type check ('integer') failed - got '{text}'"
    return "" if int(text) >= 0 else "value must have a minimum value of 0"


def _mode(text: str) -> str:
    return "" if re.fullmatch(r"0[0-7]{3}", text) else "value does not match the regex pattern"


def _device_path(text: str) -> str:
    fits = text.startswith("/dev/") and "/../" not in text
    return "" if fits else f"invalid format - {text} is not a valid device path\n"


def _mount_path(text: str) -> str:
    bad = re.search(r"(^|/)\.\.?(/|$)", text)
    return f"invalid format - {text} contains illegal character sequences\n" if bad else ""


def parameter_error(key: str, value: str) -> str:
    """What `pct set`, or the check of what `pct config` returns, says of a value; '' if it fits."""
    if key == "description":
        return "value may only be 8192 characters long" if len(value) > 8192 else ""
    if key == "lock" and value not in LOCKS:
        return f"value '{value}' does not have a value in the enumeration '{', '.join(LOCKS)}'"
    if key == "env" and "=" not in value:
        return "value does not match the regex pattern"
    if key in INTEGERS:
        if not re.fullmatch(r"[+-]?[0-9]+", value):
            return f"type check ('integer') failed - got '{value}'"
        least = INTEGERS[key]
        return "" if int(value) >= least else f"value must have a minimum value of {least}"
    if key in BOOLEANS:
        return _boolean(value)
    if not known(key):
        return ""
    error = format_error(key, value)
    if isinstance(error, dict):
        lines = "\n".join(f"{key}.{name}: {text}" for name, text in error.items())
        return f"invalid format - format error\n{lines}\n"
    return f"invalid format - {error}\n" if error else ""
