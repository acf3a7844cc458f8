"""The edit of a container's configuration, cut off, raced and refused at each of its commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deployer.model import Shell
from deployer.pct_edit import Edit
from deployer.steps import container_changes as changes
from tests.local_transport import shell_path
from tests.unit.hoststeps import SHELLS, tool

OLD = "arch: amd64\nmemory: 512\nostype: debian\n\n[s1]\nmemory: 1\n"
NEW = "arch: amd64\nmemory: 512\nostype: debian\nlxc.cap.drop: x\n\n[s1]\nmemory: 1\n"
COMMANDS = ("cat", "flock", "mv", "rm", "sha1sum", "stat")


class Host:
    """A folder with container 129, and the edit of it as a script."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.conf = root / "etc/pve/lxc/129.conf"
        self.conf.parent.mkdir(parents=True)
        self.conf.write_text(OLD)
        self.conf.chmod(0o640)
        self.tools = root / "tools"

    def edit(self, shell: list[str] = SHELLS[0], tools: str = "tools:") -> Any:
        """Runs the edit of what the file holds now, in a session of its own."""
        before = self.conf.read_text()
        action = changes.edit_lines(129, before, Edit(("lxc.cap.drop: x",)), "for a test").action
        assert isinstance(action, Shell)
        script = action.script
        for path in ("/run/lock/lxc", "/etc/pve", "/var/lib/deployer"):
            script = script.replace(path, f"{self.root}{path}")
        return subprocess.run(
            [*shell, "-c", script],
            input=action.stdin,
            env={"PATH": tools.replace("tools", str(self.tools)) + shell_path("dash", self.root)},
            capture_output=True,
            check=False,
            timeout=30,
            start_new_session=True,
        )

    def instead(self, name: str, script: str) -> None:
        """A program of this name that does `script`; REAL is the real one."""
        tool(self.tools, name, script.replace("REAL", str(shutil.which(name))))

    def files(self) -> list[str]:
        """What lies beside the configuration."""
        return sorted(path.name for path in self.conf.parent.iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_command_it_leaves_one_whole_text(host: Host, after: bool) -> None:
    count, limit = host.root / "count", host.root / "limit"
    for name in COMMANDS:
        act = 'REAL "$@"\nkill -9 0' if after else "kill -9 0"
        host.instead(
            name,
            f"""echo >>{count}
n=0 most=0
while read -r _; do n=$((n + 1)); done <{count}
read -r most <{limit}
if [ $n -gt $most ]; then
{act}
fi
exec REAL "$@"
""",
        )
    texts = set()
    for at in range(40):
        host.conf.write_text(OLD)
        count.unlink(missing_ok=True)
        limit.write_text(f"{at}\n")
        done = host.edit()
        left = host.conf.read_text()
        assert left in (OLD, NEW)
        if done.returncode == 0:
            break
        assert done.returncode == -9
        texts.add(left)
        host.edit(tools="")
        assert host.conf.read_text() == NEW
        assert host.files() == ["129.conf"]
    else:
        pytest.fail("it never came to its end")
    assert at > 10
    assert texts == {OLD, NEW}
    kept = host.root / "var/lib/deployer/lxc/129"
    assert {path.read_text() for path in kept.glob("*.conf")} <= {OLD, NEW}


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_owner_and_mode_stay(host: Host, shell: list[str]) -> None:
    done = host.edit(shell)
    assert (done.returncode, done.stderr) == (0, b"")
    assert host.conf.read_text() == NEW
    assert oct(host.conf.stat().st_mode & 0o7777) == "0o640"
    assert host.files() == ["129.conf"]


def test_one_who_writes_without_the_lock_meanwhile_keeps_what_was_written(host: Host) -> None:
    other = OLD.replace("512", "4096")
    host.instead("cat", f'if [ $# -eq 0 ]; then printf "{other}" >{host.conf}; fi\nexec REAL "$@"')
    done = host.edit()
    assert done.returncode == 1
    assert b"was changed by another meanwhile; nothing was written" in done.stderr
    assert host.conf.read_text() == other
    assert host.files() == ["129.conf"]


def test_a_container_that_went_to_another_node_meanwhile(host: Host) -> None:
    host.instead("flock", f'rm -f {host.conf}\nexec REAL "$@"')
    done = host.edit()
    assert done.returncode == 1
    assert b"was changed by another meanwhile" in done.stderr
    assert host.files() == []


@pytest.mark.parametrize(
    ("name", "script", "told"),
    [
        ("mv", "case $* in *lxc/129.conf) echo denied >&2; exit 1 ;; esac", "cannot be replaced"),
        (
            "cat",
            "if [ $# -eq 0 ]; then echo denied >&2; exit 1; fi",
            "cannot be written; without quorum",
        ),
        ("cat", 'if [ $# -gt 0 ]; then echo "No space left" >&2; exit 1; fi', "no copy of"),
        ("mkdir", 'case $* in *var/lib*) echo "No space left" >&2; exit 1 ;; esac', "no copy of"),
        ("chmod", "exit 1", "owner and mode of"),
    ],
)
def test_what_fails_leaves_the_file_as_it_was(
    host: Host, name: str, script: str, told: str
) -> None:
    host.instead(name, f'{script}\nexec REAL "$@"')
    done = host.edit()
    assert done.returncode == 1
    assert told in done.stderr.decode()
    assert host.conf.read_text() == OLD
    assert host.files() == ["129.conf"]
    kept = host.root / "var/lib/deployer/lxc/129"
    assert not list(kept.glob("*.tmp"))


def test_a_folder_behind_a_link_and_a_file_system_without_modes(host: Host) -> None:
    """As /etc/pve/lxc is: a link to nodes/NAME/lxc, on which owner and mode are fixed."""
    real = host.root / "etc/pve/nodes/kpro5/lxc"
    real.parent.mkdir(parents=True)
    host.conf.parent.rename(real)
    host.conf.parent.symlink_to("nodes/kpro5/lxc")
    host.instead(
        "stat", "case $* in *%u*%a*) echo 0:33 640 ;; *%u*) echo 0:33 ;; *) echo 640 ;; esac"
    )
    for name in ("chmod", "chown", "ln", "touch"):
        host.instead(name, "echo refused >&2; exit 1")
    done = host.edit()
    assert (done.returncode, done.stderr) == (0, b"")
    assert host.conf.read_text() == NEW
    assert host.conf.parent.is_symlink()
