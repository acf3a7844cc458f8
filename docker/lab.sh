#!/bin/sh
# The container lab. `sh docker/lab.sh` on a bare Debian 12 (root, git): installs what is missing,
# builds, starts the lab and runs `deploy -i docker/inventory up kpro5`; its exit code is that one's.
#
#   lab.sh                      everything
#   lab.sh setup                everything but the deploy
#   lab.sh up | down | status   start, remove, show the lab
#   lab.sh reset [HOST...]      hosts (default: all, and the hub) as after the first start
#   lab.sh fault NAME [on|off] [HOST]    default: on, kpro5; of the hub too: as that host meets it
#   lab.sh faults [all]         the faults that exist; all: each failure and bad answer of a server too
#   lab.sh deploy COMMAND...    the deploy command on the lab's inventory: lab.sh deploy status --all
#   lab.sh ssh HOST|HOST-guest [COMMAND...]
set -eu
export LC_ALL=C
here=$(cd "$(dirname "$0")" && pwd)
root=${here%/*}
build=$here/.build
context=$build/context
hosts="kpro5 kpro6"

say() { echo "lab: $*"; }
die() { echo "lab: $*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
container() { echo "deployer-lab-$1"; }

is_host() { case " $hosts " in *" $1 "*) ;; *) die "no host $1; hosts are: $hosts" ;; esac; }

port_of() {
    case $1 in
    kpro5) echo 22105 ;; kpro5-guest) echo 22125 ;;
    kpro6) echo 22106 ;; kpro6-guest) echo 22126 ;;
    *) die "no machine $1; there are: kpro5 kpro5-guest kpro6 kpro6-guest" ;;
    esac
}

compose() {
    if docker compose version >/dev/null 2>&1; then
        docker compose -p deployer-lab -f "$here/compose.yaml" "$@"
    elif have docker-compose; then
        docker-compose -p deployer-lab -f "$here/compose.yaml" "$@"
    else
        die "no Compose: install the plugin (docker compose) or docker-compose"
    fi
}

# --- what the machine needs -------------------------------------------------------------------

need_packages() {
    missing=
    # A client alone (a CI image has one) is no Docker: something must answer, or be there to start.
    { have docker && { have dockerd || docker info >/dev/null 2>&1; }; } || missing="$missing docker.io"
    { docker compose version >/dev/null 2>&1 || have docker-compose; } || missing="$missing docker-compose"
    have ssh-keygen || missing="$missing openssh-client"
    if ! have uv; then
        python3 -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
    fi
    [ -e /etc/ssl/certs/ca-certificates.crt ] || missing="$missing ca-certificates"
    [ -n "$missing" ] || return 0
    [ "$(id -u)" = 0 ] || die "missing:$missing; run once as root"
    have apt-get || die "missing:$missing; install them (only apt is known here)"
    say "installing$missing"
    apt-get update -qq || die "apt-get update failed"
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing iptables \
        >"$build/apt.log" 2>&1 || { tail -n 5 "$build/apt.log" >&2; die "apt-get install failed"; }
}

need_docker() {
    docker info >/dev/null 2>&1 && return 0
    [ "$(id -u)" = 0 ] || die "no access to Docker: is it running, and are you in the group docker?"
    have dockerd || die "Docker does not answer and there is no dockerd here"
    say "starting dockerd (log: /var/log/dockerd.log)"
    setsid dockerd </dev/null >>/var/log/dockerd.log 2>&1 9>&- &
    n=0
    until docker info >/dev/null 2>&1; do
        n=$((n + 1))
        [ $n -le 60 ] || { tail -n 5 /var/log/dockerd.log >&2; die "dockerd is not ready after 60 s"; }
        sleep 1
    done
}

need_base() {
    docker image inspect debian:bookworm-slim >/dev/null 2>&1 && return 0
    say "fetching debian:bookworm-slim"
    timeout 60 docker pull -q debian:bookworm-slim >/dev/null 2>&1 && return 0
    say "no registry answers"
    if ! have debootstrap; then
        [ "$(id -u)" = 0 ] || die "debootstrap is missing; run once as root"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends debootstrap >"$build/apt.log" 2>&1 || die "cannot install debootstrap"
    fi
    sh "$here/base.sh" debian:bookworm-slim
}

# --- keys, build context, images --------------------------------------------------------------

make_keys() {
    key=$build/id_ed25519
    [ -e "$key" ] || ssh-keygen -q -t ed25519 -N '' -C deployer-lab -f "$key"
    chmod 600 "$key"
    for host in $hosts; do
        for part in host guest; do
            folder=$build/keys/$host/$part
            mkdir -p "$folder"
            [ -e "$folder/ssh_host_ed25519_key" ] ||
                ssh-keygen -q -t ed25519 -N '' -C "$host-$part" -f "$folder/ssh_host_ed25519_key"
        done
        cp "$key.pub" "$build/keys/$host/authorized_keys"
    done
}

# Keeps a file that would not change, so that image layers stay cached.
put() {
    cat >"$1.new"
    if cmp -s "$1.new" "$1"; then rm "$1.new"; else mv "$1.new" "$1"; fi
}

pip_setting() { python3 -m pip config get "global.$1" 2>/dev/null || true; }

make_context() {
    mkdir -p "$context"
    # What this machine needs to reach registries, the guests need too.
    put "$context/ca.crt" <"${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}"
    { have apt-config && apt-config dump 2>/dev/null | grep -i '^Acquire::.*::Proxy ' || true; } |
        put "$context/apt.conf"
    index=${PIP_INDEX_URL:-${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-$(pip_setting index-url)}}}
    extra=${PIP_EXTRA_INDEX_URL:-}
    {
        echo "[global]"
        echo "cert = /etc/ssl/certs/ca-certificates.crt"
        echo "disable-pip-version-check = true"
        echo "timeout = ${PIP_DEFAULT_TIMEOUT:-60}"
        [ -z "$index" ] || echo "index-url = $index"
        [ -z "$extra" ] || echo "extra-index-url = $extra"
    } | put "$context/pip.conf"
    { [ -z "$index" ] || echo "index-url = \"$index\""; } | put "$context/uv.toml"
    {
        # uv looks at this where a playbook names no bundle.
        echo "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"
        for name in http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; do
            eval "value=\${$name:-}"
            [ -z "$value" ] || echo "$name=$value"
        done
        [ -z "${http_proxy:-}${https_proxy:-}${HTTPS_PROXY:-}" ] || echo "no_proxy=localhost,127.0.0.1,hub"
    } | put "$context/environment"
    OUT=$context sh "$here/driver/make.sh" >/dev/null
    cp "$here/driver/nvidia-smi" "$context/nvidia-smi"
    rm -rf "$context/wheels"
    mkdir -p "$context/wheels"
    sh "$here/engine/build.sh" "$context/wheels" >"$build/wheels.log" 2>&1 ||
        { tail -n 5 "$build/wheels.log" >&2; die "building the wheels failed"; }
}

build_image() { # NAME CONTEXT [docker build options]
    name=$1 folder=$2
    shift 2
    docker build -q -t "deployer-lab-$name" \
        --build-arg http_proxy --build-arg https_proxy --build-arg no_proxy "$@" "$folder" \
        >"$build/$name.log" 2>&1 ||
        { tail -n 15 "$build/$name.log" >&2; die "building the image $name failed (log: $build/$name.log)"; }
}

build_images() {
    say "building images"
    build_image guest "$here" -f "$here/guest/Dockerfile"
    build_image host "$here" -f "$here/host/Dockerfile"
    build_image hub "$here/hub"
}

make_deployer() {
    if [ ! -e "$build/venv" ]; then
        if [ -x "$root/.venv/bin/deploy" ] && "$root/.venv/bin/deploy" --version >/dev/null 2>&1; then
            return 0
        fi
        say "installing the deployer into docker/.build/venv"
    fi
    if have uv; then
        SSL_CERT_FILE=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt} UV_PROJECT_ENVIRONMENT=$build/venv uv sync -q --no-dev --project "$root" >"$build/venv.log" 2>&1
    else
        python3 -m venv "$build/venv" >"$build/venv.log" 2>&1 &&
            "$build/venv/bin/python" -m pip install -q -e "$root" >>"$build/venv.log" 2>&1
    fi || { tail -n 5 "$build/venv.log" >&2; die "installing the deployer failed (log: $build/venv.log)"; }
}

deploy() {
    for bin in "$build/venv/bin" "$root/.venv/bin"; do
        if [ -x "$bin/deploy" ]; then "$bin/deploy" "$@"; return; fi
    done
    die "the deployer is not installed: lab.sh setup"
}

# --- the lab ----------------------------------------------------------------------------------

wait_ready() { # HOST...
    for host in "$@"; do
        n=0
        until docker exec "$(container "$host")" test -e /run/lab/ready 2>/dev/null; do
            n=$((n + 1))
            if [ $n -gt 150 ]; then
                docker logs --tail 10 "$(container "$host")" >&2 || true
                die "$host is not ready after 30 s"
            fi
            sleep 0.2
        done
    done
}

wait_hub() {
    n=0
    until docker exec "$(container hub)" python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:8900/_stats", timeout=2)' 2>/dev/null; do
        n=$((n + 1))
        [ $n -le 60 ] || { docker logs --tail 10 "$(container hub)" >&2; die "the hub is not ready after 30 s"; }
        sleep 0.5
    done
}

# The keys are read from inside the containers, not asked of whoever answers on the port.
trust() {
    for host in $hosts; do
        for part in host guest; do
            folder=/etc/ssh name=$host
            [ "$part" = host ] || { folder=/var/lib/lxc/129/rootfs/etc/ssh name=$host-guest; }
            public=$(docker exec "$(container "$host")" cat "$folder/ssh_host_ed25519_key.pub") ||
                die "cannot read the host key of $name"
            # shellcheck disable=SC2086  # type, key, comment
            set -- $public
            echo "[127.0.0.1]:$(port_of "$name") $1 $2"
        done
    done | put "$build/known_hosts"
}

up() {
    for name in guest host hub; do
        docker image inspect "deployer-lab-$name" >/dev/null 2>&1 || die "no image $name: lab.sh setup"
    done
    make_keys
    compose up -d >"$build/compose.log" 2>&1 || { tail -n 5 "$build/compose.log" >&2; die "compose up failed"; }
    # shellcheck disable=SC2086  # a list of words
    wait_ready $hosts
    wait_hub
    trust
    say "up: kpro5 127.0.0.1:22105 (guest :22125), kpro6 :22106 (:22126), hub :8900 (CDN :8901, CAS :8902)"
}

reset() {
    hub=
    [ $# -gt 0 ] || { hub=hub; set -- $hosts; }
    for host in "$@"; do is_host "$host"; done
    # shellcheck disable=SC2086  # empty or one word
    compose up -d -t 0 --no-deps --force-recreate "$@" $hub >"$build/compose.log" 2>&1 ||
        { tail -n 5 "$build/compose.log" >&2; die "reset failed"; }
    wait_ready "$@"
    if [ -n "$hub" ]; then wait_hub; else for host in "$@"; do hub_faults '[]' "$host"; done; fi
    say "reset: $*${hub:+ hub}"
}

hub_faults() { # FAULTS HOST
    docker exec -i "$(container hub)" python3 -c '
import sys, urllib.request
url = "http://127.0.0.1:8900/_faults?client=" + sys.argv[1]
request = urllib.request.Request(url, sys.stdin.buffer.read(), method="POST")
urllib.request.urlopen(request, timeout=5).read()' "$2" <<EOF || die "the hub refused: $1"
$1
EOF
}

list_faults() {
    grep '^hub-' "$here/hub/faults.txt"
    cat <<'EOF'
server-degenerate       the server answers with one repeated token
server-degenerate-mtp   the same, only while speculation is on
server-empty            the server answers with nothing
server-slow             the server answers slowly
server-dies-after-first the server dies after its first request
server-dies-silent      the server dies while starting, without a word
server-never-ready      the server starts and is never ready
server-strays           it leaves a process that got away: renamed, double-forked, deaf to TERM
server-hangs            the server is healthy and never answers
server-thinks-aloud     its reasoning parser does not fit: thoughts stand in the content
server-swallows         its reasoning parser takes every answer for a thought
server-thinks-on        the model never ends its thoughts
server-refuses-thinking enable_thinking is answered with 400
server-degenerates-late only long answers degenerate
server-degenerates-long only answers to long prompts degenerate
server-dies-at-edge     a prompt that fills the context kills the server
gpu-held                VM 101 runs and holds the GPU 0000:21:00.0
no-driver               the NVIDIA module and nvidia-smi are not installed on the host
disk-full               /srv/models in the guest has 8 MB
old-server              an old server holds port 30000 in the guest (on at first)
host-key-changed        the host's SSH key is another one than recorded
EOF
}

# A failure of each class of the tool's table, and each kind of bad answer, alone or after a good start.
list_server_faults() {
    folder=$here/engine/sglang/lookalike
    sed -n 's/^    "\([a-z0-9-]*\)": Death(.*/server-fails-\1/p' "$folder/deaths.py"
    for kind in $(sed -n '/^KINDS/,/^}/s/^    "\([a-z-]*\)": .*/\1/p' "$folder/outputs.py") count-stuck garbage; do
        echo "server-says-$kind"
        echo "server-says-$kind-late"
    done
}

fault() {
    name=${1:-} want=${2:-on} host=${3:-kpro5}
    [ -n "$name" ] || die "which fault? lab.sh faults"
    { list_faults; list_server_faults; } | sed 's/ .*//' | grep -qx -- "$name" ||
        die "no fault $name; lab.sh faults all lists them"
    case $want in on | off) ;; *) die "on or off, not $want" ;; esac
    is_host "$host"
    case $name in
    hub-*) if [ "$want" = on ]; then hub_faults "[\"$name\"]" "$host"; else hub_faults '[]' "$host"; fi ;;
    *) docker exec "$(container "$host")" /usr/lib/lab/fault "$name" "$want" || die "fault $name failed" ;;
    esac
    say "fault $name $want"
}

status() {
    for name in $hosts hub; do
        state=$(docker inspect -f '{{.State.Status}}' "$(container "$name")" 2>/dev/null) || state=absent
        line="$name: $state"
        if [ "$state" = running ] && [ "$name" != hub ]; then
            line="$line; CT 129 $(docker exec "$(container "$name")" pct status 129 | cut -d' ' -f2)"
            line="$line; faults: $(docker exec "$(container "$name")" /usr/lib/lab/fault | tr '\n' ' ')"
        fi
        echo "$line"
    done
}

login() {
    [ $# -gt 0 ] || die "ssh to what? kpro5 kpro5-guest kpro6 kpro6-guest"
    port=$(port_of "$1")
    shift
    exec ssh -i "$build/id_ed25519" -o UserKnownHostsFile="$build/known_hosts" -o IdentitiesOnly=yes \
        -p "$port" root@127.0.0.1 "$@"
}

setup() {
    mkdir -p "$build"
    need_packages
    need_docker
    need_base
    make_keys
    make_deployer
    make_context
    build_images
    up
}

# Two hosts may be driven by two programs: what starts containers goes one after another.
one_at_a_time() {
    mkdir -p "$build"
    exec 9>"$build/lock"
    flock -w 300 9 || die "another lab.sh has been starting containers for 300 s"
}

command=${1:-all}
[ $# -eq 0 ] || shift
case $command in
all)
    setup
    status=0
    deploy -i "$here/inventory" up kpro5 || status=$?
    say "more: sh docker/lab.sh deploy status --all; what can go wrong: sh docker/lab.sh faults"
    exit $status ;;
setup) one_at_a_time; setup ;;
build) mkdir -p "$build"; make_keys; make_context; build_images ;;
up) one_at_a_time; need_docker; up ;;
down) one_at_a_time; compose down -t 1 >/dev/null 2>&1 || die "compose down failed"; say "down" ;;
reset) one_at_a_time; reset "$@" ;;
fault) fault "$@" ;;
faults) list_faults; [ "${1:-}" != all ] || list_server_faults ;;
deploy) deploy -i "$here/inventory" "$@" ;;
ssh) login "$@" ;;
status) status ;;
-h | --help | help) sed -n '2,13s/^# \{0,1\}//p' "$0" ;;
*) die "unknown command: $command; lab.sh help" ;;
esac
