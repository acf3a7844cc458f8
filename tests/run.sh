#!/bin/sh
# Sets up everything and runs all tests: sh tests/run.sh [unit|scripts|container|vmlab|long|PYTEST ARGS...]
#   unit       no network, no Docker; 6,000 tests, about a minute on two cores
#   scripts    real scripts and processes under dash and busybox; no network, no Docker
#   container  a real sshd and the container lab
#   vmlab      a real kernel in QEMU: vfio-pci, IOMMU groups, LXC
#   long       many whole runs of `up` (migrate, rollback, nodes, fifty hosts); not among "all"
# On a bare Debian/Ubuntu as root it installs what is missing; as a normal user it uses what is there.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'tests/run.sh: %s\n' "$*" >&2; }

need_packages() {
    missing=""
    command -v python3 >/dev/null 2>&1 || missing="$missing python3"
    python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
    [ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
    command -v ssh >/dev/null 2>&1 || missing="$missing openssh-client"
    command -v busybox >/dev/null 2>&1 || missing="$missing busybox"
    [ -e /etc/ssl/certs/ca-certificates.crt ] || missing="$missing ca-certificates"
    # Clients and tools that some tests drive; without them these tests skip and say why.
    wanted=""
    case $1 in
        unit) ;;
        scripts) command -v curl >/dev/null 2>&1 || wanted="$wanted curl" ;;
        *)
            command -v curl >/dev/null 2>&1 || wanted="$wanted curl"
            command -v rsync >/dev/null 2>&1 || wanted="$wanted rsync"
            command -v aria2c >/dev/null 2>&1 || wanted="$wanted aria2"
            command -v mkfs.btrfs >/dev/null 2>&1 || wanted="$wanted btrfs-progs"
            command -v qemu-system-x86_64 >/dev/null 2>&1 || wanted="$wanted qemu-system-x86"
            ;;
    esac
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        [ -z "$wanted" ] || say "some tests will skip for want of:$wanted"
        [ -n "$missing" ] || return 0
        say "missing:$missing"
        say "  -> install them, or run this once as root on Debian/Ubuntu"
        exit 1
    fi
    missing="$missing$wanted"
    [ -n "$missing" ] || return 0
    say "installing$missing"
    apt-get update -qq
    # shellcheck disable=SC2086 # a list of package names
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

need_venv() {
    if [ ! -x .venv/bin/uv ]; then
        say "making .venv"
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            say "python3 is older than 3.11"
            say "  -> install Python 3.11 or newer and put it first in PATH"
            exit 1
        }
        python3 -m venv .venv
        .venv/bin/python -m pip install -q --disable-pip-version-check uv
    fi
    # uv brings certificates of its own; the machine's hold a company proxy's too.
    export SSL_CERT_FILE="${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}"
    .venv/bin/uv sync -q --frozen --inexact
}

need_packages "${1-all}"
need_venv

all=
case "${1-all}" in
    unit | scripts)
        folder=tests/$1
        shift
        exec .venv/bin/python -m pytest -n 3 --dist loadfile "$folder" "$@"
        ;;
    all) all=yes; [ $# -eq 0 ] || shift; set -- -m "not long" "$@" ;;
    container | vmlab) folder=tests/$1; shift; set -- "$folder" "$@" ;;
    long) shift; set -- -m long "$@" ;;
esac

say "setting up the container lab"
sh docker/lab.sh setup
# The VM lab's disk is built while other tests run; the first test that needs it waits for it.
[ -z "$all" ] || .venv/bin/python tests/vmlab/image.py >docker/.build/vmlab.log 2>&1 &
# Pytest's closing line is the last; what lint and types found counts all the same.
checks=0
.venv/bin/ruff check . || checks=1
.venv/bin/mypy || checks=1
.venv/bin/lint-imports || checks=1
status=0
# Three processes: half of the time is waiting. tests/labfiles.py says what stays together.
.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || status=$?
[ $checks = 0 ] || {
    say "ruff, mypy or lint-imports failed: see above the tests"
    [ $status -ne 0 ] || status=1
}
exit $status
