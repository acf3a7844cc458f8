"""The playbook: what is wanted. Model and revision, engine lock, serve arguments, gates.

The commented sample `playbooks/` is the documentation (`deploy help playbook`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from deployer import names
from deployer.inventory import Line, Port, Strict

Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
AbsolutePath = Annotated[str, Field(pattern=names.ABSOLUTE_PATH)]
Sha256 = Annotated[str, Field(pattern=names.SHA256)]
EnvName = Annotated[str, Field(pattern=names.ENV_NAME)]
ArgValue = bool | int | float | str
"""True: the bare flag; False: the flag is left out; else `--flag value`."""

FIELD_OF_FLAG = {
    "model-path": "model.path",
    "model": "model.path",
    "served-model-name": "model.served_name",
    "host": "serve.host",
    "port": "serve.port",
    "api-key": "serve.api_key_env",
}
"""Flags of the server that have a field of their own; they may not stand among the arguments."""
NODE_FLAGS = frozenset({"nnodes", "node-rank", "dist-init-addr", "nccl-init-addr"})
"""Flags that `nodes` sets."""
DIST_PORTS = 6
"""SGLang 0.5.11 uses so many ports from `--dist-init-addr` on (PortArgs.init_new)."""
SECRET_FLAGS = frozenset({"admin-api-key", "ssl-keyfile-password"})
"""Flags whose value is a secret: on a command line, in plans and in the state all could read it."""


class Model(Strict):
    """The weights. `path` is where they lie on the target."""

    repo: Annotated[str, Field(pattern=names.REPO)]
    revision: Annotated[str, Field(pattern=names.LINE, max_length=200)] = "main"
    path: AbsolutePath
    served_name: Annotated[str, Field(pattern=names.LINE, max_length=200)]
    ignore: list[Line] = Field(default_factory=lambda: ["*.bin", "*.pth", "*.gguf", "original/*"])
    """fnmatch patterns of files that are not fetched."""


Method = Literal["range", "hf-xet", "mirror", "peer"]
METHODS: tuple[Method, ...] = ("range", "hf-xet", "mirror", "peer")


class Peer(Strict):
    """Another machine that has the same files; the target reaches it by its own SSH, with rsync."""

    address: Annotated[str, Field(pattern=names.ADDRESS, max_length=253)]
    user: Annotated[str, Field(pattern=names.USER)] = "root"
    port: Port = 22
    path: AbsolutePath
    """The model's folder there."""
    identity_file: AbsolutePath | None = None
    """Private key, on the target; None: what the target's ssh uses by itself."""


class Download(Strict):
    """How the weights are fetched."""

    endpoint: Line = "https://huggingface.co"
    """As seen from the controller (metadata)."""
    target_endpoint: Line | None = None
    """As seen from the target (bytes); None: the same."""
    token_env: EnvName = "HF_TOKEN"
    """Name of the controller's environment variable that holds the token; may be unset."""
    ca_bundle: AbsolutePath | None = None
    """PEM file on the target for a company proxy."""
    proxy: Line | None = None
    """http://HOST:PORT, as seen from the target; None: no proxy."""
    methods: Annotated[list[Method], Field(min_length=1)] = Field(
        default_factory=lambda: list(METHODS)
    )
    """Tried in this order; one that cannot be used on the target is skipped, and said so.

    `range`: our own agent. `hf-xet`: huggingface_hub with hf-xet out of the engine's venv.
    `mirror`: our agent against each of `mirrors`. `peer`: rsync from `peer`.
    """
    mirrors: list[Line] = Field(default_factory=list)
    """Other endpoints with the same repositories, as seen from the target."""
    peer: Peer | None = None
    connections: Annotated[int, Field(ge=1, le=64)] = 4
    bwlimit_bytes_per_s: Annotated[int, Field(ge=0)] = 0
    """Upper bound of all connections together; 0: none."""
    stall_s: Seconds = 45.0
    """No new byte on the wire and on the disk for so long: the method is killed."""
    floor_bytes_per_s: Annotated[int, Field(ge=0)] = 100_000
    """A method whose mean over `floor_window_s` is lower is killed too; 0: no floor."""
    floor_window_s: Seconds = 120.0
    phase_s: Seconds = 60.0
    """Longest phase without bytes: start-up, questions to the Hub."""
    stalls_per_method: Annotated[int, Field(ge=1, le=1000)] = 2
    """So many kills bar a method for this run."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 5
    """How often a download job that vanished or was killed from outside is started again."""
    margin_bytes: Annotated[int, Field(ge=0)] = 5_000_000_000
    """Free bytes that must remain after the download."""


class DriverPackage(Strict):
    """An NVIDIA `.run` installer; exactly one of `url`, `file` and `local`."""

    url: Line | None = None
    """Fetched on the machine that installs it."""
    file: AbsolutePath | None = None
    """A file on the host (for the guest it is copied from there)."""
    local: Line | None = None
    """A file of the controller, sent over; relative to the playbook's folder."""
    sha256: Sha256
    ca_bundle: AbsolutePath | None = None
    """PEM file on the target, for `url` behind a company proxy."""
    proxy: Line | None = None
    """http://HOST:PORT as seen from the target, for `url`."""


class Driver(Strict):
    """The wanted NVIDIA driver."""

    version: Annotated[str, Field(pattern=names.DRIVER_VERSION)]
    flavour: Literal["auto", "open", "proprietary"] = "auto"
    """Of the kernel module; `auto`: what the GPUs need, else NVIDIA's default for this version."""
    install: Literal["never", "guest", "host-and-guest"] = "never"
    package: DriverPackage | None = None
    packages: list[Annotated[str, Field(pattern=names.APT_PIN)]] = Field(default_factory=list)
    """The host's driver by apt instead of `package`: NAME=VERSION each, held afterwards."""


class Gpus(Strict):
    """What may be done to the PCI functions."""

    rebind: Literal["allowed", "never"] = "allowed"
    persist: Literal["report", "unit", "change"] = "unit"
    """Across reboots. `report`: only tell what the next boot does. `unit`: a boot unit of ours
    brings the GPUs to nvidia before guests start. `change`: besides, take them out of what gives
    them to vfio-pci (modprobe.d, kernel command line, driverctl), then renew initramfs and loader.
    """
    persistenced: Literal["allowed", "never"] = "allowed"
    """May nvidia-persistenced be stopped while a GPU leaves nvidia, when nothing else holds it?"""
    unbind_timeout_s: Seconds = 20.0


class Engine(Strict):
    """The serving engine, installed on the target from a lock."""

    name: Literal["sglang"] = "sglang"
    version: Annotated[str, Field(pattern=names.ENGINE_VERSION)]
    python: Annotated[str, Field(pattern=names.PYTHON_VERSION)] = "3.12"
    lock: Line
    """requirements file with hashes or exact pins, beside the playbook."""
    venv: AbsolutePath
    """The stable path: a symlink that is switched atomically to the build."""
    index_url: Line | None = None
    """`none`: no index at all, only `find_links`."""
    find_links: list[Line] = Field(default_factory=list)
    """Folders or URLs on the target with local wheels."""
    ca_bundle: AbsolutePath | None = None
    uv_version: Annotated[str, Field(pattern=names.UV_VERSION)] = ">=0.5"
    build_timeout_s: Seconds = 3600.0


class Phases(Strict):
    """The longest that each phase of a start may take, in seconds; `ready_timeout_s` is for all.

    A draft model that is loaded after the first one has the phases once more.
    """

    start_s: Seconds = 300.0
    """Imports, arguments, tokenizer."""
    distributed_s: Seconds = 300.0
    """The GPUs find each other (NCCL)."""
    weights_s: Seconds = 1500.0
    """All shards: 150 GB from a disk of 100 MB/s."""
    pools_s: Seconds = 300.0
    """State slots and KV cache are allocated."""
    graphs_s: Seconds = 1200.0
    """CUDA graphs; at the first start kernels are compiled too."""
    warmup_s: Seconds = 900.0
    """From the server's process to its first own answer; again with kernels to compile."""


class Serve(Strict):
    """Arguments of the server. `args` keys are flag names without dashes in front."""

    host: Annotated[str, Field(pattern=names.ADDRESS)] = "0.0.0.0"
    port: Port = 30000
    args: dict[Annotated[str, Field(pattern=names.FLAG_NAME)], ArgValue] = Field(
        default_factory=dict
    )
    env: dict[EnvName, Annotated[str, Field(pattern=names.ENV_VALUE)]] = Field(default_factory=dict)
    dist_port: Port = 20000
    """With `nodes`: the first node is met by the others at this port, and 5 above it are used."""
    api_key_env: EnvName | None = None
    """Name of the controller's environment variable with the API key."""
    ready_timeout_s: Seconds = 1800.0
    silence_timeout_s: Seconds = 600.0
    """No new log byte for so long while starting is a failure."""
    phases: Phases = Field(default_factory=Phases)
    memory_step: Literal["allowed", "never"] = "allowed"
    """A launch that fails for memory by a little may be tried once more with one argument changed
    by this tool (mem-fraction-static by 0.02 or 0.04, or fewer requests), where SGLang's own
    arithmetic says that it will start, before the next variant; one step up and one down a run.
    The old server is stopped by then: a server a little smaller serves, none does not. It is named
    after the change, as `mtp~mem-0.02`, and called degraded."""
    log_max_bytes: Annotated[int, Field(ge=4096)] = 64 * 1024 * 1024
    keep_launches: Annotated[int, Field(ge=1)] = 5


class Variant(Strict):
    """One rung of the ladder: changes to serve.args."""

    name: Annotated[str, Field(pattern=names.VARIANT_NAME)]
    args: dict[Annotated[str, Field(pattern=names.FLAG_NAME)], ArgValue] = Field(
        default_factory=dict
    )


class Stop(Strict):
    """How the old server is stopped."""

    drain_s: Annotated[float, Field(ge=0, le=86400)] = 0.0
    """Before TERM: wait so long until no request runs or waits. New ones still come in, so take
    the server out of its router first. 0: TERM at once; SGLang ends what it has within grace_s."""
    grace_s: Seconds = 60.0
    kill_s: Seconds = 15.0
    old_server: Literal["stop-ours", "adopt"] = "stop-ours"
    """`adopt`: a server that holds our port, in our container, with a launch_server command line
    may be stopped too, even if this tool did not start it. `stop-ours`: it is reported and left."""
    gpu_floor_mib: Annotated[int, Field(ge=0)] = 600
    """Used memory a GPU may show after the stop."""


class Gates(Strict):
    """What a launch must pass before it counts as serving."""

    request_timeout_s: Seconds = 240.0
    """SGLang compiles kernels at first use: a first answer of 88 s was seen on an H200."""
    min_tokens: Annotated[int, Field(ge=1)] = 300
    """A long answer must have so many, or its degeneration would not show."""
    max_tokens: Annotated[int, Field(ge=1)] = 768
    think_tokens: Annotated[int, Field(ge=1)] = 4096
    """A question whose answer is cut while the model still thinks is asked again with so many."""
    thinking: Literal["auto", "default"] = "auto"
    """`auto`: texts also with thinking the other way (enable_thinking); `default`: never."""
    long_prompt_tokens: Annotated[int, Field(ge=0)] = 6500
    """Length of the long prompt, by the server's own count; 0: no such gate."""
    context_edge: bool = True
    """One request that fills the context to its end."""
    burst: Annotated[int, Field(ge=1)] = 25
    parallel: Annotated[int, Field(ge=1)] = 8
    alive_after_s: Annotated[float, Field(ge=0, le=3600)] = 60.0
    memory_growth_mib: Annotated[int, Field(ge=0)] = 2048
    """Of one GPU, from before the load to `alive_after_s` after it."""
    max_accept_rate: Annotated[float, Field(gt=0, le=1)] = 0.98
    """Above it speculation is suspect; with repetition it is a failure."""
    min_accept_rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Below it speculation only costs: a warning."""
    max_slowdown: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share by which a figure may be worse than the last known-good launch's: a warning."""
    slow_is_failure: bool = False
    ab_on_failure: bool = True
    """`up`: after a bad answer with speculation on, the same prompts without it; this needs another
    launch, in place of the bad one."""
    on_failure: Literal["restore", "stop", "leave"] = "restore"
    """`up`: what becomes of a launch that failed. `restore`: the known-good one that it replaced is
    started again, else the server that it ended (stop.old_server: adopt); without either it keeps
    running, marked as failed. `stop`: it is ended besides."""


class Keep(Strict):
    """What `gc` keeps for a way back, besides what is in use and the known-good launch's.

    `up` itself removes builds beyond `venvs` when it has switched to a new one, and folders of
    launches beyond serve.keep_launches; nothing else."""

    venvs: Annotated[int, Field(ge=1, le=100)] = 2
    """Builds of the engine's venv, the one in use among them."""
    models: Annotated[int, Field(ge=1, le=100)] = 2
    """Folders of weights, the one in use among them."""
    jobs: Annotated[int, Field(ge=1, le=1000)] = 3
    """Folders of each job (build, download)."""
    floor_bytes: Annotated[int, Field(ge=0)] = 20_000_000_000
    """With less free on the file system, what is kept only for its number goes as well, one by one
    until so much is free: uv's cache, the oldest build, the oldest weights. Above it the cache
    stays: with it the next build, or one that a rollback needs again, is made without fetching."""


class Rollout(Strict):
    """How one run changes several hosts with this playbook."""

    canary: bool = True
    """The first host that has something to do must pass its gates before the others act."""


class Playbook(Strict):
    """One playbook file."""

    model: Model
    nodes: list[Annotated[str, Field(pattern=names.HOST_NAME)]] | None = None
    """Hosts that serve the model together (SGLang's --nnodes), the first answers. Each has a
    deployment of the same name with this playbook. None: each deployment is a server of its own."""
    download: Download = Field(default_factory=Download)
    driver: Driver
    gpus: Gpus = Field(default_factory=Gpus)
    engine: Engine
    serve: Serve = Field(default_factory=Serve)
    variants: list[Variant] = Field(default_factory=list)
    stop: Stop = Field(default_factory=Stop)
    gates: Gates = Field(default_factory=Gates)
    keep: Keep = Field(default_factory=Keep)
    rollout: Rollout = Field(default_factory=Rollout)
