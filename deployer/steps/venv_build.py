"""The job that builds an environment beside the old one, proves it and switches to it. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources

from deployer.deployment import Deployment
from deployer.model import RunJob
from deployer.shell import assignments, quote
from deployer.steps.venv_facts import OWN_UV, normal

NO_INDEX = "none"
UV_CACHE = "/opt/deployer/cache/uv"
SETTINGS = "settings.sh"
"""File of the job: caches, index, certificates."""
STALL_S = 900.0
"""A big wheel may be compiled or unpacked for minutes without a byte of growth."""

_SCRIPT = r"""
set -u
umask 022
die() { printf 'error: %s\n' "$1"; exit "${2:-1}"; }

grow() {
  # Runs "$@"; says how many bytes it has brought, so that silence is told from work.
  "$@" &
  work=$!
  while kill -0 "$work" 2>/dev/null; do
    kb=$(du -skc "$BUILD" "$UV_CACHE_DIR" 2>/dev/null | tail -n 1 | cut -f 1)
    printf '{"what": "install", "done": %s, "unit": "bytes"}\n' "$((${kb:-0} * 1024))" \
      >progress.tmp && mv -f progress.tmp progress
    sleep 1
  done
  wait "$work"
}

prove() {
  "$BUILD/bin/python" -I venv_proof.py prove
}

if [ -z "$UV" ]; then
  printf 'installing uv%s\n' "$UV_SPEC"
  rm -rf "${OWN_UV%/bin/uv}"
  mkdir -p "${OWN_UV%/*/bin/uv}" || die "cannot write ${OWN_UV%/*/bin/uv}"
  python3 -m venv "${OWN_UV%/bin/uv}" || die "python3 -m venv failed"
  "${OWN_UV%/uv}/python" -m pip install --quiet --disable-pip-version-check "$@" "uv$UV_SPEC" \
    || die "uv$UV_SPEC could not be installed with pip"
  UV=$OWN_UV
fi
"$UV" --version || die "$UV does not run"
# uv reads ./uv.toml, with the machine's own /etc/uv/uv.toml below it.
[ ! -e uv.toml ] || set --

built=no
if [ -e "$BUILD/complete" ]; then
  printf 'found a complete build: %s\n' "$BUILD"
  prove
  case $? in
    0) built=yes ;;
    23) die "the build is complete, but no GPU runs its kernels" 23 ;;
    *) printf 'it does not pass; building it again\n' ;;
  esac
fi
if [ "$built" = no ]; then
  rm -rf "$BUILD"
  mkdir -p "${BUILD%/*}" || die "cannot write ${BUILD%/*}"
  "$UV" venv --python "$PYTHON" --python-preference system "$BUILD" \
    || die "no Python $PYTHON: neither on this machine nor from uv"
  : >"$BUILD/deployer.build"
  # shellcheck disable=SC2086
  grow "$UV" pip install --python "$BUILD/bin/python" $FLAGS "$@" -r lock.txt \
    || die "the lock could not be installed"
  : >"$BUILD/complete"
  prove || die "the new environment is not proven; the old one stays" $?
fi
"$BUILD/bin/python" -I venv_proof.py switch || die "the new environment could not be switched to"
"""


def lock_hash(lock_text: str) -> str:
    """sha256 of the lock's text, hex."""
    return hashlib.sha256(lock_text.encode()).hexdigest()


def lock_pins(lock_text: str) -> dict[str, str]:
    """Name -> version of the exact pins, names normalised. Lines with a marker are left out."""
    pins = {}
    for line in lock_text.replace("\\\n", " ").splitlines():
        text = line.partition(" #")[0].strip()
        match = re.fullmatch(
            r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;,*]+)"
            r"(?:\s+--hash=\S+)*",
            text,
        )
        if match:
            pins[normal(match[1])] = match[2]
    return pins


def has_hashes(lock_text: str) -> bool:
    """True when the lock gives hashes: then every line must, and uv is told so."""
    return "--hash=" in lock_text


def local_first(find_links: Sequence[str]) -> str:
    """uv.toml that makes folders of wheels the first indexes.

    With plain --find-links uv merges them with the index and takes the closest platform tag: a
    local `py3-none-any` wheel then loses to another build of its version.
    """
    text = 'index-strategy = "unsafe-first-match"\n'
    for number, link in enumerate(find_links):
        text += f'[[index]]\nname = "local-{number}"\nurl = {json.dumps(link)}\nformat = "flat"\n'
    return text


def sm(capabilities: Sequence[str]) -> str:
    """`sm_86`, or `sm_86+sm_90` for a mixed box."""
    return "+".join(f"sm_{c.replace('.', '')}" for c in sorted(set(capabilities)))


def same_build(one: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> bool:
    """Do two jobs, each as its script and SETTINGS, build the same from the same place? By which
    uv does not matter: the first job may have been the one that brought it.
    """
    return _lines(one[0]) == _lines(other[0]) and one[1] == other[1]


def _lines(script: bytes) -> list[bytes]:
    return [line for line in script.splitlines() if not line.startswith(b"UV=")]


def build_path(want: Deployment, capabilities: Sequence[str], linked: str) -> str:
    """Where to build: named by lock, Python and GPU; never the folder that is in use now."""
    engine = want.playbook.engine
    arch = sm(capabilities).replace("_", "")
    base = f"{engine.venv}.builds/{lock_hash(want.lock_text)[:12]}-{engine.python}-{arch}"
    return f"{base}-b" if linked == base else base


def build_job(
    want: Deployment,
    capabilities: Sequence[str],
    gpus: int,
    linked: str,
    uv: str,
    needed: Sequence[str] = (),
) -> RunJob:
    """The job. `uv`: an installed one that is new enough, or '' to bring our own. `needed`: builds
    that stay, however old.

    Wheels of `find_links` go before the index, which may hold another build of the very same
    version; `index_url: none` means that nothing else is looked at.
    """
    engine = want.playbook.engine
    build = build_path(want, capabilities, linked)
    links = "".join(f" --find-links {quote(link)}" for link in engine.find_links)
    flags = ["--require-hashes"] if has_hashes(want.lock_text) else []
    if engine.index_url == NO_INDEX:
        flags.append("--no-index")
    values = {
        "BUILD": build,
        "PYTHON": engine.python,
        "UV": uv,
        "OWN_UV": OWN_UV,
        "UV_SPEC": engine.uv_version,
        "FLAGS": " ".join(flags),
    }
    exported = {
        "UV_CACHE_DIR": UV_CACHE,
        "UV_PYTHON_INSTALL_DIR": "/opt/deployer/python",
        "UV_NO_PROGRESS": "1",
        # Not hard links: a file patched by hand in a build would come back from the cache.
        "UV_LINK_MODE": "copy",
        "UV_HTTP_TIMEOUT": "120",
    }
    if engine.index_url and engine.index_url != NO_INDEX:
        # By environment: an url may carry a password, and argv is for everyone to read.
        exported |= {"UV_DEFAULT_INDEX": engine.index_url, "PIP_INDEX_URL": engine.index_url}
    if engine.ca_bundle:
        exported |= {"SSL_CERT_FILE": engine.ca_bundle, "PIP_CERT": engine.ca_bundle}
    settings = assignments(exported) + f"export {' '.join(exported)}\n"
    proof = {
        "engine": engine.name,
        "version": engine.version,
        "lock": lock_hash(want.lock_text),
        "pins": lock_pins(want.lock_text),
        "capabilities": sorted(set(capabilities)),
        "gpus": gpus,
        "build": build,
        "link": engine.venv,
        "keep": want.playbook.keep.venvs,
        "needed": list(needed),
    }
    agent = resources.files("deployer.agents").joinpath("venv_proof.py").read_bytes()
    files = {
        SETTINGS: settings.encode(),
        "lock.txt": want.lock_text.encode(),
        "proof.json": json.dumps(proof, indent=1).encode(),
        "venv_proof.py": agent,
    }
    if engine.find_links and engine.index_url != NO_INDEX:
        files["uv.toml"] = local_first(engine.find_links).encode()
    return RunJob(
        want.guest,
        f"venv-{want.name}",
        assignments(values) + f". ./settings.sh\nset --{links}\n" + _SCRIPT,
        files=files,
        timeout_s=engine.build_timeout_s,
        stall_s=min(STALL_S, engine.build_timeout_s),
    )
