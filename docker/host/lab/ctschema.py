"""The schema that pct holds container keys to: types, bounds, formats, sub-keys, and its texts.

The facts are those of pve-container 6 and pve-common 9 (as recorded runs and the manual pct.conf(5)
tell them); the checker is the lab's own.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_TRUE = re.compile(r"^(1|on|yes|true)$", re.IGNORECASE)
_FALSE = re.compile(r"^(0|off|no|false)$", re.IGNORECASE)
_NUMBER = re.compile(r"^[+-]?([0-9]+\.[0-9]+|[0-9]+\.|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?$")
_PAIR = re.compile(r"^([^=]+)=(.+)$", re.DOTALL)
_BLANK = re.compile(r"^\s*$", re.ASCII)
_EXTRA = "property is not defined in schema and the schema does not allow additional properties"
_MISSING = "property is missing and it is not optional"
_LARGEST = 2**64 - 1


@dataclass(frozen=True)
class Rule:
    """One key or sub-key. `check` says what is wrong with the text, '' for nothing."""

    kind: str = "string"
    needed: bool = False
    least: int | None = None
    most: int | None = None
    pattern: str = ""
    words: tuple[str, ...] = ()
    longest: int | None = None
    check: Callable[[str], str] | None = None
    parts: Mapping[str, Rule] = field(default_factory=dict)
    default_part: str = ""


@dataclass(frozen=True)
class Refused(Exception):
    """A text does not fit its format; the text ends with a line end."""

    text: str


def split(text: str) -> list[str]:
    """A list as pct takes it apart."""
    return [word for word in re.split(r"[,;\s\0]+", text) if word]


def parts_of(rule: Rule, value: str, path: str = "") -> dict[str, str]:
    """A property string `default,key=value,...` as sub-keys; booleans are 0 or 1.

    Raises Refused.
    """
    found: dict[str, str] = {}
    bare = False
    for part in value.split(","):
        if _BLANK.match(part):
            continue
        if pair := _PAIR.match(part):
            name, text = pair[1], pair[2]
            if name in found:
                raise Refused(f"duplicate key in comma-separated list property: {name}\n")
            known = rule.parts.get(name)
            found[name] = _boolean(text) if known and known.kind == "boolean" else text
            continue
        if "=" in part:
            raise Refused("missing key in comma-separated list property\n")
        if not rule.default_part:
            raise Refused("value without key, but schema does not define a default key\n")
        if bare or found.get(rule.default_part):
            raise Refused(f"duplicate key in comma-separated list property: {rule.default_part}\n")
        bare = True
        found[rule.default_part] = part
    errors = {}
    for name in (*rule.parts, *(name for name in found if name not in rule.parts)):
        place = f"{path}.{name}" if path else name
        if name not in rule.parts:
            errors[place] = _EXTRA
        elif name not in found:
            if rule.parts[name].needed:
                errors[place] = _MISSING
        elif text := fault(rule.parts[name], found[name], place):
            errors[place] = text
    if errors:
        raise Refused("format error\n" + "".join(f"{k}: {v}\n" for k, v in errors.items()))
    return found


def printed(rule: Rule, found: Mapping[str, str]) -> str:
    """Sub-keys as pct writes them: the default one, the needed ones, the others, each sorted."""
    first = [rule.default_part] if rule.default_part in found else []
    needed = sorted(n for n in found if n in rule.parts and rule.parts[n].needed)
    names = dict.fromkeys([*first, *needed, *sorted(found)])
    return ",".join(found[n] if n == rule.default_part else f"{n}={found[n]}" for n in names)


def _boolean(text: str) -> str:
    return "1" if _TRUE.match(text) else "0" if _FALSE.match(text) else text


def form_fault(rule: Rule, value: str, path: str = "") -> str:
    """What the format of a key says of a value, with its line end; '' when it fits."""
    if rule.parts:
        try:
            parts_of(rule, value, path)
        except Refused as refused:
            return refused.text
        return ""
    text = rule.check(value) if rule.check is not None else ""
    return f"{text}\n" if text else ""


def fault(rule: Rule, value: str, path: str) -> str:
    """What a parameter check says of a value; '' when it fits."""
    kind = rule.kind
    typed = {
        "boolean": value in ("0", "1"),
        "integer": bool(re.fullmatch(r"[+-]?[0-9]+", value)),
        "number": bool(_NUMBER.match(value)),
    }
    if not typed.get(kind, True):
        return f"type check ('{kind}') failed - got '{value}'"
    if text := form_fault(rule, value, path):
        return f"invalid format - {text}"
    if rule.pattern and not re.fullmatch(rule.pattern, value, re.ASCII):
        return "value does not match the regex pattern"
    if rule.longest is not None and len(value) > rule.longest:
        return f"value may only be {rule.longest} characters long"
    if _NUMBER.match(value):
        if rule.most is not None and float(value) > rule.most:
            return f"value must have a maximum value of {rule.most}"
        if rule.least is not None and float(value) < rule.least:
            return f"value must have a minimum value of {rule.least}"
    if rule.words and value not in rule.words:
        listed = ", ".join(rule.words)
        return f"value '{value}' does not have a value in the enumeration '{listed}'"
    return ""


def read(rule: Rule, value: str) -> tuple[str, str]:
    """The value as pct keeps it when it reads the file, and its complaint with its line end."""
    if "\r" in value:
        return value, "property contains a line feed\n"
    if rule.kind == "boolean":
        text = _boolean(value)
        wrong = "" if text in ("0", "1") else f"type check ('boolean') failed - got '{value}'\n"
        return text, wrong
    if rule.kind == "integer":
        if not re.fullmatch(r"[0-9]+", value):
            return value, f"type check ('integer') failed - got '{value}'\n"
        number = int(value)
        return (str(number) if number <= _LARGEST else f"{float(number):.15g}"), ""
    if rule.kind == "number":
        fits = re.fullmatch(r"[0-9]+(\.[0-9]+)?", value)
        return value, "" if fits else f"type check ('number') failed - got '{value}'\n"
    return value, form_fault(rule, value)


def _dns(value: str) -> str:
    label = r"[a-zA-Z0-9]([a-zA-Z0-9\-]*[a-zA-Z0-9])?"
    fits = re.fullmatch(rf"({label}\.)*{label}", value)
    return "" if fits else "value does not look like a valid DNS name"


def _volume(value: str) -> str:
    fits = re.match(r"^[a-z][a-z0-9\-_.]*[a-z0-9]:.+$", value, re.IGNORECASE)
    return "" if fits else f"unable to parse volume ID '{value}'"


def _config_id(value: str) -> str:
    fits = re.fullmatch(r"[a-z][a-z0-9_-]+", value, re.IGNORECASE)
    return "" if fits else f"invalid configuration ID '{value}'"


def _tag(value: str) -> str:
    fits = re.fullmatch(r"[a-z0-9_][a-z0-9_\-+.]*", value, re.IGNORECASE)
    return "" if fits else "invalid characters in tag"


def _path(value: str) -> str:
    bad = re.search(r"/\.\.?/|/\.\.?$|^\.\./", value)
    return f"{value} contains illegal character sequences" if bad else ""


def _device(value: str) -> str:
    bad = re.search(r"/\.\.?(/|$)", value) or not value.startswith("/dev/")
    return f"{value} is not a valid device path" if bad else ""


def _size(value: str) -> str:
    fits = re.fullmatch(r"[0-9]+(\.[0-9]+)?[KMGT]?", value)
    return "" if fits else f"value does not look like a valid disk size: {value}"


def _mac(value: str) -> str:
    fits = re.fullmatch(r"[a-f0-9][02468ace](:[a-f0-9]{2}){5}", value, re.IGNORECASE)
    return "" if fits else "value does not look like a valid unicast MAC address"


def _is_ip(value: str, version: int) -> bool:
    if version == 4:
        octet = "(25[0-5]|2[0-4][0-9]|[01]?[0-9]?[0-9])"
        return bool(re.fullmatch(rf"({octet}\.){{3}}{octet}", value))
    try:
        return ipaddress.ip_address(value).version == version
    except ValueError:
        return False


def _address(version: int) -> Callable[[str], str]:
    text = f"value does not look like a valid IPv{version} address"
    return lambda value: "" if _is_ip(value, version) else text


def _network(version: int, words: tuple[str, ...]) -> Callable[[str], str]:
    most = 32 if version == 4 else 128

    def check(value: str) -> str:
        host, slash, bits = value.rpartition("/")
        fits = slash and bits.isdigit() and 7 < int(bits) <= most and _is_ip(host, version)
        if value in words or fits:
            return ""
        return f"value does not look like a valid ipv{version} network configuration"

    return check


def _server(value: str) -> str:
    plain = re.sub(r"^(fe80:[^%]+)%[a-z][a-z0-9_]{1,20}([:.][0-9]+)?$", r"\1", value, flags=re.I)
    good = _is_ip(plain, 4) or _is_ip(plain, 6)
    return "" if good else "value does not look like a valid IP address"


def _startup(value: str) -> str:
    part = r"(order=)?[0-9]+|up=[0-9]+|down=[0-9]+"
    bad = [p for p in value.split(",") if not _BLANK.match(p) and not re.fullmatch(part, p)]
    return "unable to parse startup options" if bad or value == "0" else ""


def _zone(value: str) -> str:
    known = value in ("host", "UTC")
    if not known and re.fullmatch(r"[A-Za-z]+(/[A-Za-z0-9_+-]+)+", value):
        known = not os.path.isdir("/usr/share/zoneinfo") or os.path.isfile(
            f"/usr/share/zoneinfo/{value}"
        )
    return "" if known else f"invalid time zone '{value}'"


def _each(check: Callable[[str], str]) -> Callable[[str], str]:
    return lambda value: next((text for word in split(value) if (text := check(word))), "")


BOOLEAN = Rule("boolean")
_MOUNT_OPTION = "(discard|lazytime|noatime|nodev|noexec|nosuid)"
_ROOTFS = {
    "volume": Rule(needed=True, check=_path),
    "size": Rule(check=_size),
    "acl": BOOLEAN,
    "mountoptions": Rule(pattern=f"{_MOUNT_OPTION}(;{_MOUNT_OPTION})*"),
    **dict.fromkeys(("ro", "quota", "replicate", "shared"), BOOLEAN),
}
_MOUNT = {
    **_ROOTFS,
    "backup": BOOLEAN,
    "mp": Rule(needed=True, check=_path),
    "idmap": Rule(),
    "keepattrs": BOOLEAN,
}
_DEVICE = {
    "path": Rule(check=_device),
    "mode": Rule(pattern="0[0-7]{3}"),
    "uid": Rule("integer", least=0),
    "gid": Rule("integer", least=0),
    "deny-write": BOOLEAN,
}
_NET = {
    "type": Rule(words=("veth",)),
    "name": Rule(needed=True, pattern=r"[-_.\w]+"),
    "bridge": Rule(pattern=r"[-_.\w]+"),
    "hwaddr": Rule(check=_mac),
    "mtu": Rule("integer", least=64, most=65535),
    "ip": Rule(check=_network(4, ("dhcp", "manual"))),
    "gw": Rule(check=_address(4)),
    "ip6": Rule(check=_network(6, ("auto", "dhcp", "manual"))),
    "gw6": Rule(check=_address(6)),
    "firewall": BOOLEAN,
    "tag": Rule("integer", least=1, most=4094),
    "trunks": Rule(pattern=r"\d+(;\d+)*"),
    "rate": Rule("number"),
    "link_down": BOOLEAN,
    "host-managed": BOOLEAN,
}
_FEATURES = {
    "mount": Rule(pattern="[a-zA-Z0-9_; ]+"),
    **dict.fromkeys(("nesting", "keyctl", "fuse", "mknod", "force_rw_sys"), BOOLEAN),
}
_PRINTABLE = r"[^\x00-\x08\x10-\x1f\x7f]"
LOCKS = tuple(
    "backup create destroyed disk fstrim migrate mounted rollback snapshot snapshot-delete".split()
)
_OSTYPES = (
    "debian devuan ubuntu centos fedora opensuse archlinux alpine gentoo nixos unmanaged"
).split()
KEYS: dict[str, Rule] = {
    **dict.fromkeys(
        ("console", "debug", "onboot", "protection", "template", "unprivileged"), BOOLEAN
    ),
    "arch": Rule(words=("amd64", "i386", "arm64", "armhf", "riscv32", "riscv64")),
    "cmode": Rule(words=("shell", "console", "tty")),
    "cores": Rule("integer", least=1, most=8192),
    "cpulimit": Rule("number", least=0, most=8192),
    "cpuunits": Rule("integer", least=0, most=500000),
    "description": Rule(longest=8192),
    "entrypoint": Rule(pattern=f"{_PRINTABLE}+"),
    "env": Rule(pattern=rf"\w+={_PRINTABLE}*(\0\w+={_PRINTABLE}*)*"),
    "features": Rule(parts=_FEATURES),
    "hookscript": Rule(check=_volume),
    "hostname": Rule(check=_dns, longest=255),
    "lock": Rule(words=LOCKS),
    "memory": Rule("integer", least=16),
    "nameserver": Rule(check=_each(_server)),
    "ostype": Rule(words=tuple(_OSTYPES)),
    "parent": Rule(check=_config_id, longest=40),
    "rootfs": Rule(parts=_ROOTFS, default_part="volume"),
    "searchdomain": Rule(check=_each(_dns)),
    "snaptime": Rule("integer", least=0),
    "startup": Rule(check=_startup),
    "swap": Rule("integer", least=0),
    "tags": Rule(check=_each(_tag)),
    "timezone": Rule(check=_zone),
    "tty": Rule("integer", least=0, most=6),
}
NUMBERED: dict[str, tuple[int, Rule]] = {
    "dev": (256, Rule(parts=_DEVICE, default_part="path")),
    "mp": (256, Rule(parts=_MOUNT, default_part="volume")),
    "net": (32, Rule(parts=_NET)),
    "unused": (
        256,
        Rule(parts={"volume": Rule(needed=True, check=_volume)}, default_part="volume"),
    ),
}
_INDEXED = re.compile(r"^([a-z]+)(0|[1-9][0-9]*)$", re.ASCII)


def rule_of(key: str) -> Rule | None:
    """The rule of a key; None for a key that the schema does not have."""
    if key in KEYS:
        return KEYS[key]
    found = _INDEXED.match(key)
    count, rule = NUMBERED.get(found[1], (0, None)) if found else (0, None)
    return rule if found and int(found[2]) < count else None
