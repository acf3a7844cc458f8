"""A survey becomes an inventory file that loads again, whatever the machine says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from deployer import proxmox
from deployer.catalog import Catalog
from deployer.cli import doctor_bare, init
from deployer.cli.direct import Way, retold, ssh_of, written
from deployer.cli.main import group
from deployer.errors import AuthenticationRefused, HostKeyUnknown, Unreachable, UsageError
from deployer.findings import Level
from deployer.gpu import SmiGpu
from deployer.inventory import Ssh
from deployer.remote.hostkeys import HostKey
from deployer.remote.sshtry import Door, Tried
from deployer.steps.boot_facts import BootFacts, BootFile
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.driver_facts import GuestDriver, HostDriver, HostGpu, HostKernels, HostSmi
from deployer.steps.driver_facts import Userspace as Libraries
from deployer.steps.gpus_facts import GpuFacts, Holder, Overrides, PciFunction, Pending
from deployer.survey import Guest, Survey, addresses, candidates
from deployer.survey_facts import GuestLook, Machine, usable
from deployer.survey_findings import findings
from deployer.survey_yaml import Target, comment, render, scalar
from tests.unit.hoststeps import A, B

ROOT = Path(__file__).parents[2]
KEY = HostKey("ssh-ed25519", b"blob")
CONF = "hostname: sglang\nnet0: name=eth0,bridge=vmbr0,ip=dhcp\nunprivileged: 1\n"


def function(address: str = A, driver: str = "vfio-pci", minor: int | None = None) -> PciFunction:
    return PciFunction(address, True, "0x10de", "0x2230", "0x030000", driver, "14", minor=minor)


def machine(*functions: PciFunction, guests: tuple[Guest, ...] = (), **changes: object) -> Survey:
    """A Proxmox host with these GPUs, all well."""
    gpus = tuple(HostGpu(one.address, "0x2230", one.driver) for one in functions)
    seen = Survey(
        Machine(
            "kpro5", 0, "root", "Debian", True, "8.2.4", True, known=(("2230", "G [RTX A6000]"),)
        ),
        "root",
        "root",
        HostDriver("580.126.09", "open", "580.126.09", "6.8.12-4-pve", gpus=gpus),
        HostSmi(200, ""),
        HostKernels(),
        BootFacts(),
        GpuFacts(functions=functions, displays=functions),
        Overrides(),
        guests,
    )
    return replace(seen, **changes)  # type: ignore[arg-type]


def guest(vmid: int = 129, conf: str = CONF, status: str = "running", **more: object) -> Guest:
    return Guest(vmid, ContainerFacts(status, conf=conf), **more)  # type: ignore[arg-type]


def target(**changes: object) -> Target:
    made = Target("kpro5", Ssh(address="192.0.2.5", user="root"), "deploy init root@192.0.2.5")
    return replace(made, **changes)  # type: ignore[arg-type]


def text_of(seen: Survey, wanted: Target | None = None) -> str:
    wanted = wanted or target()
    text = render(wanted, seen, findings(wanted.name, seen))
    init.check(wanted.name, text)
    return text


def loaded(folder: Path, text: str) -> Catalog:
    """The file in an inventory beside the sample playbooks."""
    (folder / "inventory").mkdir(exist_ok=True)
    (folder / "inventory/kpro5.yaml").write_text(text, encoding="utf-8")
    if not (folder / "playbooks").exists():
        (folder / "playbooks").symlink_to(ROOT / "playbooks")
    return Catalog.load(folder / "inventory")


def uncommented(text: str) -> str:
    head, found, tail = text.partition("    # deployments:\n")
    assert found
    return head + re.sub(r"^    # ", "    ", found + tail, flags=re.MULTILINE)


ODD = st.text(
    st.one_of(
        st.sampled_from("'\"\\:#{}[],&*!|>%@`-? \t\n\r\0\x85\u2028\ufeff\x7f é日🚀"),
        st.characters(),
    ),
    max_size=40,
)
ADDRESS = st.sampled_from(["192.0.2.9", "10.0.0.1", "2001:db8::9", "2001:db8:0:1::ff"])


@st.composite
def guests(draw: st.DrawFn, vmid: int) -> Guest:
    hostname = draw(ODD).encode("utf-8", "replace").decode().replace("\n", " ")
    minor = draw(st.sampled_from([None, 0, 1, 7]))
    conf = f"hostname: {hostname}\nnet0: name=eth0,ip={draw(ADDRESS)}/24\n"
    conf += f"template: {int(draw(st.booleans()))}\n"
    conf += "" if minor is None else f"dev0: /dev/nvidia{minor}\n"
    conf += "lock: backup\n" if draw(st.booleans()) else ""
    running = draw(st.booleans())
    seen = ContainerFacts(
        "running" if running else "stopped", conf=draw(st.sampled_from([conf, None]))
    )
    if not running:
        return Guest(vmid, seen)
    found = draw(
        st.lists(st.tuples(st.sampled_from(["eth0", "docker0", "-"]), ADDRESS), max_size=3)
    )
    driver = GuestDriver(Libraries((("libcuda.so", "575.64.03"),)))
    look = GuestLook(tuple(found), draw(st.sampled_from([22, 2222])), (KEY,), driver)
    look = draw(st.sampled_from([look, GuestLook(problem=draw(ODD))]))
    door = draw(st.sampled_from(Door))
    tried = Tried(door, draw(ADDRESS), draw(ODD)) if not look.problem else None
    return Guest(vmid, seen, look, tried)


@st.composite
def surveys(draw: st.DrawFn) -> Survey:
    functions = [function(A, draw(st.sampled_from(["", "nvidia", "vfio-pci", "nouveau"])), 0)]
    functions += [function(B, "nvidia", 1)] if draw(st.booleans()) else []
    rows = (SmiGpu(0, "", draw(ODD), "", None, None, "", A),)
    many = draw(st.sampled_from([0, 1, 2, 20]))
    made = machine(*functions)
    return replace(
        made,
        machine=replace(
            made.machine, name=draw(ODD), os=draw(ODD), pct=draw(st.booleans()), pve=draw(ODD)
        ),
        user=draw(ODD),
        eyes=draw(st.sampled_from(["root", "sudo", "user"])),
        smi=HostSmi(draw(st.sampled_from([0, 9, 200])), draw(ODD), rows),
        guests=tuple(draw(guests(100 + number)) for number in range(many)),
    )


@settings(max_examples=60, deadline=None)
@given(surveys(), ODD, st.sampled_from(["192.0.2.5", "2001:db8::1", "[2001:db8::1]", "kpro5"]))
def test_what_is_written_loads_again(seen: Survey, odd: str, address: str) -> None:
    clean = "".join(char for char in odd if char.isprintable())
    ssh = Ssh(address=address, port=22105, user="root", identity_file=f"../{clean}")
    wanted = target(ssh=ssh, command=f"deploy init {odd}")
    text = text_of(seen, wanted)
    for form in (text, uncommented(text)):
        init.check("kpro5", form)
    made = init.parse(Path("x"), text).data["hosts"]["kpro5"]
    assert made["ssh"]["address"] == address
    assert [one["address"] for one in made["gpus"]] == [one.address for one in seen.gpus.functions]
    listed = made.get("containers", {})
    kept = [one for one in seen.guests if one.seen.exists and not one.template]
    assert list(listed) == [one.vmid for one in kept if seen.kind == "proxmox"]
    for one in kept if seen.kind == "proxmox" else ():
        assert ("ssh" in listed[one.vmid]) == one.by_ssh
    assert "deployments" not in made


def test_uncommented_it_is_a_deployment(tmp_path: Path) -> None:
    seen = machine(
        function(minor=0),
        function(B, minor=1),
        guests=(
            guest(128),
            guest(
                129,
                CONF + "dev0: /dev/nvidia1\n",
                look=GuestLook((("eth0", "192.0.2.129"),), keys=(KEY,)),
                tried=Tried(Door.OPEN, "192.0.2.129"),
            ),
            guest(130, CONF + "template: 1\n", "stopped"),
        ),
    )
    text = text_of(seen, target(playbooks=("qwen3.6-27b",)))
    catalog = loaded(tmp_path, text)
    assert not catalog.hosts["kpro5"].deployments
    assert sorted(catalog.hosts["kpro5"].containers) == [128, 129]
    want = loaded(tmp_path, uncommented(text)).select(["kpro5"])[0]
    assert want.id == "kpro5/qwen"
    assert want.vmid == 129
    assert want.gpus == (B,)
    assert want.container is not None
    assert want.container.ssh is not None
    assert want.container.ssh.address == "192.0.2.129"
    assert want.gpu_ids == {A: "10de:2230", B: "10de:2230"}
    assert "    #   deploy trust kpro5\n    #   deploy plan kpro5\n" in text
    assert "# container 130 (sglang) left out: a template" in text


def test_a_plain_machine_has_no_containers(tmp_path: Path) -> None:
    seen = machine(function(driver="nvidia", minor=0))
    seen = replace(seen, machine=replace(seen.machine, pct=False, pve=""))
    text = text_of(seen)
    assert "containers" not in text
    want = loaded(tmp_path, uncommented(text)).select(["kpro5/qwen"])[0]
    assert want.vmid is None
    assert "Nothing that was seen stands in the way." in text


def test_names_of_gpus() -> None:
    one = function()
    seen = machine(one)
    assert seen.gpu_name(one) == "RTX A6000"
    rows = (SmiGpu(0, "", "NVIDIA H200", "", None, None, "", A),)
    assert replace(seen, smi=HostSmi(0, "", rows)).gpu_name(one) == "H200"
    of_driver = replace(seen.machine, models=((A, "NVIDIA RTX 6000 Ada"),))
    assert replace(seen, machine=of_driver).gpu_name(one) == "RTX 6000 Ada"
    nameless = replace(seen, machine=replace(seen.machine, known=()))
    assert nameless.gpu_name(one) == ""
    assert "name:" not in text_of(nameless)


def test_virtual_functions_and_strange_addresses_are_left_out_and_told() -> None:
    gpus = tuple(
        HostGpu(one, "0x2230") for one in (A, "0000:21:00.4", "0000:21:01.0", "10000:01:00.0")
    )
    driver = HostDriver("580.1", "open", gpus=gpus)
    here = Machine("x", 0, virtual=("0000:21:00.4", "0000:21:01.0"))
    good, left = candidates(driver, here)
    assert good == (A,)
    assert left == ("0000:21:00.4", "0000:21:01.0", "10000:01:00.0")
    seen = replace(machine(function(driver="nvidia")), driver=driver, machine=here)
    told = {one.where: one.what for one in findings("x", seen)}
    assert "virtual function" in told["0000:21:01.0"]
    assert "cannot name" in told["10000:01:00.0"]


def test_addresses() -> None:
    seen = ContainerFacts("running", conf="net1: name=eth1,ip=dhcp\nnet0: name=eth0,ip=dhcp\n")
    look = GuestLook(
        (
            ("docker0", "172.17.0.1"),
            ("eth1", "10.0.0.9"),
            ("eth0", "2001:db8::9"),
            ("eth0", "192.0.2.9"),
        )
    )
    assert addresses(seen, look) == ("192.0.2.9", "10.0.0.9", "2001:db8::9")
    assert addresses(seen, GuestLook((("-", "192.0.2.9"),))) == ("192.0.2.9",)
    assert addresses(seen, None) == ()
    static = ContainerFacts("stopped", conf="net0: name=eth0,ip=192.0.2.7/24,ip6=auto\n")
    assert addresses(static, None) == ("192.0.2.7",)
    assert addresses(static, GuestLook(problem="frozen")) == ("192.0.2.7",)
    for text in ("127.0.0.1/8", "fe80::1/64", "nonsense", "", "0.0.0.0", "ff02::1"):
        assert usable(text) == ""


def levels(seen: Survey) -> dict[str, Level]:
    return {one.what: one.level for one in findings("kpro5", seen)}


def test_what_stands_in_the_way() -> None:
    one = function()
    seen = machine(one)
    assert levels(seen) == {"on vfio-pci": Level.PENDING}
    held = replace(seen.gpus, holders=((A, Holder(7, "kvm", vm=100)),))
    told = levels(replace(seen, gpus=held))
    assert any("in use by pid 7 (kvm) of VM 100" in what for what in told)
    assert Level.BLOCKED in told.values()
    claim = proxmox.Claim(100, ("0000:21:00",), onboot=True, running=False, name="win")
    told = levels(replace(seen, gpus=replace(seen.gpus, claims=(claim,))))
    assert told[f"VM 100 (win) starts at boot and takes {A}"] is Level.WARNING
    claim = replace(claim, running=True)
    told = levels(replace(seen, gpus=replace(seen.gpus, claims=(claim,))))
    assert told[f"{A} belongs to running VM 100 (win)"] is Level.BLOCKED
    stuck = Pending(9, "sh", "D", A, "a write to unbind")
    told = levels(replace(seen, gpus=replace(seen.gpus, pending=(stuck,))))
    assert any("only a host reboot clears it" in what for what in told)
    told = levels(machine(function(driver="nouveau")))
    assert told[f"{A} is bound to nouveau"] is Level.BLOCKED
    told = levels(replace(seen, driver=replace(seen.driver, loaded="", on_disk="")))
    assert told["there is no nvidia module for kernel 6.8.12-4-pve"] is Level.BLOCKED
    told = levels(replace(seen, smi=HostSmi(124, "", timed_out=True)))
    assert any(what.startswith("nvidia-smi on kpro5: ") for what in told)
    conf = BootFile("/etc/modprobe.d/x.conf", b"install nvidia /bin/false\n")
    unloaded = replace(seen, boot=BootFacts((conf,)), driver=replace(seen.driver, loaded=""))
    told = levels(unloaded)
    assert any("forbidden by /etc/modprobe.d/x.conf:1" in what for what in told)


def test_access_that_is_not_roots() -> None:
    seen = machine(function())
    told = levels(replace(seen, user="anna", eyes="sudo"))
    assert (
        told["anna is not root: it was looked at through `sudo -n`, and `deploy up` works as root"]
        is Level.BLOCKED
    )
    assert any("cannot be seen" in what for what in levels(replace(seen, eyes="user")))
    unmounted = replace(seen, machine=replace(seen.machine, mounted=False))
    assert (
        levels(unmounted)["/etc/pve is not mounted: its containers cannot be seen"] is Level.BLOCKED
    )
    without = replace(seen, machine=replace(seen.machine, pct=False))
    assert "Proxmox VE is installed, but there is no `pct`" in levels(without)


def test_containers_that_are_not_well() -> None:
    old = GuestDriver(Libraries((("libcuda.so", "575.64.03"),)))
    made = (
        guest(101, CONF + "lock: backup\n"),
        guest(102, look=GuestLook(problem="`pct exec` failed: frozen")),
        guest(103, look=GuestLook(driver=old), tried=Tried(Door.LOCKED, "x:22", "it refuses")),
        guest(104, look=GuestLook(), tried=Tried(Door.STRANGER, "x:22", "another machine")),
        Guest(105, ContainerFacts("running", conf=CONF, ha="started")),
        Guest(106, ContainerFacts(timed_out=True)),
        guest(107, CONF + "template: 1\n", "stopped"),
    )
    seen = machine(function(driver="nvidia"), guests=made)
    told = {(one.where, one.what): one for one in findings("kpro5", seen)}
    words = {where: [what for place, what in told if place == where] for where, _ in told}
    assert "locked (backup)" in words["container 101"][0]
    assert words["container 102"] == ["`pct exec` failed: frozen"]
    assert len(words["container 103"]) == 2
    assert "575.64.03, the module is 580.126.09" in " ".join(words["container 103"])
    assert "another machine" in words["container 104"][0]
    assert "HA manager" in words["container 105"][0]
    assert "did not answer" in words["container 106"][0]
    assert "container 107" not in words


def test_two_containers_that_share_a_gpu(tmp_path: Path) -> None:
    """By a devN entry and by a raw mount; whether or not the driver tells which GPU it is."""
    mount = "lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file\n"
    made = (
        guest(129, CONF + "dev0: /dev/nvidia0\ndev1: /dev/nvidia1\n"),
        guest(130, CONF + "dev0: /dev/nvidiactl\n" + mount, "stopped"),
        guest(131, CONF + "dev0: /dev/nvidia1\ntemplate: 1\n", "stopped"),
    )
    seen = machine(function(A, "nvidia", 0), function(B, "nvidia", 1), guests=made)
    (one,) = (one for one in findings("kpro5", seen) if "both have" in one.what)
    assert (one.level, one.where) == (Level.WARNING, B)
    assert "containers 129 (running) and 130 (stopped) both have /dev/nvidia1" in one.what
    text = text_of(seen)
    assert set(loaded(tmp_path, text).hosts["kpro5"].containers) == {129, 130}
    assert f'gpus: ["{B}"]' in text  # 130 has one of the two
    unloaded = machine(function(A), function(B), guests=made)
    assert "/dev/nvidia1" in [one.where for one in findings("kpro5", unloaded)]


def test_words_are_made_harmless() -> None:
    assert scalar("RTX A6000") == "RTX A6000"
    assert scalar("no") == '"no"'
    assert scalar('a "b" \\ #: c') == '"a \\"b\\" \\\\ #: c"'
    assert scalar("2001:db8::1") == '"2001:db8::1"'
    assert scalar("192.0.2.5") == "192.0.2.5"
    assert comment("a\nb: c") == ["# a\ufffdb: c"]


@pytest.mark.parametrize(
    ("told", "address", "name"),
    [
        ("kpro5.example.com", "192.0.2.5", "kpro5"),
        ("KPRO_5", "x", "kpro-5"),
        ("Größe", "x", "groe"),
        ("日本", "gpu1.example.com", "gpu1-example-com"),
        ("localhost", "192.0.2.5", "192-0-2-5"),
        ("", "[2001:db8::1]", "2001-db8-1"),
        ("-", "::", "host"),
        ("a" * 80, "x", "a" * 63),
    ],
)
def test_host_names(told: str, address: str, name: str) -> None:
    assert init.host_name(told, address) == name


def test_a_word_becomes_an_entry() -> None:
    assert ssh_of("root@192.0.2.5:22105", Way()) == Ssh(
        address="192.0.2.5", port=22105, user="root"
    )
    assert ssh_of("kpro5", Way()).model_fields_set == {"address"}
    assert ssh_of("root@2001:db8::1", Way(port=2222)).address == "2001:db8::1"
    assert ssh_of("root@[2001:db8::1]:2222", Way()).port == 2222
    for word, way in (
        ("-oProxyCommand=x@y z", Way()),
        ("ROOT@x", Way()),
        ("root@", Way()),
        ("root@x:99999", Way()),
        ("root@x:22", Way(port=23)),
        ("root@x", Way(gateway="-o x")),
        ("root@x", Way(identity_file="/no/such/key")),
    ):
        with pytest.raises(UsageError):
            ssh_of(word, way)


def test_paths_as_the_inventory_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = {"identity_file": str(tmp_path / "home/.ssh/k"), "known_hosts": str(tmp_path / "a/k")}
    ssh = written(Ssh(address="x", **paths), tmp_path / "a/inventory")
    assert (ssh.identity_file, ssh.known_hosts) == ("~/.ssh/k", "../k")


def test_the_way_out_needs_no_inventory() -> None:
    error = HostKeyUnknown("unknown", fix="compare, then run `deploy trust root@x (gateway y)`")
    way = Way(port=22105, gateway="y")
    assert retold(error, "root@x", way).fix == (
        "compare, then run `deploy trust root@x --port 22105 --gateway y`"
    )
    refused = AuthenticationRefused(
        "no", fix="add it, or set `ssh.identity_file` (and `ssh.user`) in the inventory"
    )
    assert "inventory" not in retold(refused, "root@x", way).fix


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(tmp_path, monkeypatch)


class Cli:
    """`deploy init` on a machine that was looked at already."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "inventory"
        self.seen = machine(function(), guests=(guest(),))
        monkeypatch.setattr(init, "survey", lambda word, ssh, base: self.seen)

    def __call__(self, *words: str) -> tuple[int, str]:
        argv = ["-i", str(self.folder), "init", "root@192.0.2.5", *words]
        done = CliRunner().invoke(group, argv, standalone_mode=False)
        if isinstance(done.exception, UsageError):
            return done.exception.exit_code, f"{done.output}{done.exception}"
        if done.exception is not None:
            raise done.exception
        return done.return_value, done.output


def test_writes_once_and_never_over_another(cli: Cli) -> None:
    assert cli()[0] == 0
    path = cli.folder / "kpro5.yaml"
    first = path.read_text()
    assert Catalog.load(cli.folder).hosts["kpro5"].ssh.address == "192.0.2.5"
    code, told = cli()
    assert (code, "is as found" in told) == (0, True)
    cli.seen = machine(function(), function(B))
    code, told = cli()
    assert code == 2
    assert f'+      - address: "{B}"' in told
    assert "left as it is" in told
    assert path.read_text() == first
    assert [one.name for one in cli.folder.iterdir()] == ["kpro5.yaml"]
    assert cli("--name", "other")[0] == 0
    assert (cli.folder / "other.yaml").exists()


def test_a_name_that_another_file_has(cli: Cli) -> None:
    cli.folder.mkdir()
    (cli.folder / "all.yaml").write_text(
        "hosts:\n  kpro5: {ssh: {address: a}, gpus: [{address: '0000:01:00.0'}]}\n"
    )
    code, told = cli()
    assert (code, "described already" in told) == (2, True)
    assert not (cli.folder / "kpro5.yaml").exists()
    assert cli("--print")[0] == 0


def test_print_and_json_write_nothing(cli: Cli) -> None:
    code, told = cli("--print")
    assert code == 0
    init.check("kpro5", told)
    code, told = cli("--json")
    document = json.loads(told)
    assert (code, document["written"]) == (0, False)
    assert document["gpus"][0]["address"] == A
    assert document["containers"][0]["reached_by"] == "pct exec"
    assert not cli.folder.exists()
    assert json.loads(cli("--json", "--yes")[1])["written"]
    assert (cli.folder / "kpro5.yaml").read_text() == document["yaml"]
    assert cli("--json", "--print")[0] == 2
    assert cli("--name", "Not Good")[0] == 2


def test_no_gpu(cli: Cli) -> None:
    aspeed = PciFunction("0000:03:00.0", True, "0x1a03", "0x2000", "0x030000", "ast")
    cli.seen = replace(machine(), gpus=GpuFacts(displays=(aspeed,)))
    code, told = cli()
    assert code == 1
    assert "no GPU of NVIDIA was found; other display devices: 0000:03:00.0 (1a03:2000)" in told
    assert not cli.folder.exists()
    code, told = cli("--json")
    assert (code, json.loads(told)["written"]) == (1, False)


BARE = """
hosts:
  kpro5:
    ssh: {address: 192.0.2.5}
    gpus:
      - address: "0000:21:00.0"
      - address: "0000:99:00.0"
    containers:
      129: {}
      130: {}
      131: {create: {template: "local:vztmpl/x.tar.zst", storage: local, disk_gib: 9,
                     hostname: x, memory_mib: 9000, net: {bridge: vmbr0, ip: dhcp}}}
  kpro6:
    ssh: {address: 192.0.2.6}
    gpus:
      - address: "0000:21:00.0"
"""


def test_the_doctor_looks_at_hosts_without_deployments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "all.yaml").write_text(BARE)
    asked = []

    def look(name: str, ssh: Ssh, base: Path, *more: object) -> Survey:
        asked.append((name, ssh.address))
        if name == "kpro6":
            raise Unreachable("no route", where="kpro6", fix="is it on?")
        return machine(function(A, driver="nvidia"), guests=(guest(),))

    monkeypatch.setattr(doctor_bare, "survey", look)

    def doctor(*words: str) -> tuple[int, str]:
        given = ["-i", str(tmp_path / "inventory"), "doctor", *words]
        done = CliRunner().invoke(group, given, standalone_mode=False)
        assert done.exception is None
        return done.return_value, done.stdout

    code, text = doctor("kpro5")
    rows = [line.split(maxsplit=2) for line in text.splitlines()]
    assert asked == [("kpro5", "192.0.2.5")]
    assert rows[0][:3] == ["kpro5:", "2", "blocked, 1 pending"], text
    told = [row[2] for row in rows if row[0] in ("BLOCKED", "pending")]
    assert told == [
        "there is no GPU 0000:99:00.0 of NVIDIA",
        "container 130 does not exist on kpro5",
        "no deployment is written for it yet",
    ]
    assert code == 1
    code, text = doctor("--all", "--limit", "kpro6")
    assert (code, text.splitlines()[0]) == (3, "kpro6: 1 unreachable")
    code, text = doctor("--all")
    assert [line.split(":")[0] for line in text.splitlines() if line[0] != " "] == [
        "kpro5",
        "kpro6",
    ]
    with pytest.raises(UsageError, match="no host `kpro7`"):
        Catalog.load(tmp_path / "inventory").select(["kpro5", "kpro7"], bare=True)
    code, text = doctor("kpro5", "--limit", "kpro5")
    assert code == 1
    with pytest.raises(UsageError, match="is like `x`"):
        Catalog.load(ROOT / "inventory").select(["kpro5"], limit=["x"], bare=False)
