"""A project of `deploy` for two hosts and one server of both, and what is asked of them."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import environment
from hosts import Host
from project import VARIANTS, Project, Ran, plain_host
from scene import FLOOR_MIB, Scene, wait_for

NAMES = ("node0", "node1")
DEPLOYMENT = "pair"
PORTS = (31510, 31511)
"""They share a network, so each has a port of its own."""
DIST_PORT = 31600
LOOPBACK = {
    # There is no other network between the hosts.
    "SGLANG_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
NO_MULTICAST = (
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)


@dataclasses.dataclass
class Pair:
    """The two hosts and what is asked of them."""

    project: Project
    hosts: list[Host]
    base_mib: list[int]

    def write(self) -> None:
        """Inventory and playbook."""
        project = self.project
        project.inventory.mkdir(parents=True, exist_ok=True)
        (project.folder / "playbooks/locks").mkdir(parents=True, exist_ok=True)
        lock = environment.make(project.folder / "wheels")
        (project.folder / "playbooks/locks/here.txt").write_text(lock)
        book = project.playbook("learned", VARIANTS)
        kept = {name: os.environ[name] for name in NO_MULTICAST if name in os.environ}
        book["nodes"] = list(NAMES)
        book["serve"] |= {
            "port": PORTS[0],
            "dist_port": DIST_PORT,
            "args": {**project.serve, "tp-size": len(NAMES)},
            "env": {**LOOPBACK, **kept},
        }
        project.put(f"playbooks/{DEPLOYMENT}.yaml", book)
        for host, port in zip(self.hosts, PORTS, strict=True):
            entry = {"playbook": DEPLOYMENT, "port": port, "node_address": "127.0.0.1"}
            body = {**plain_host(host.sshd, host.gpu), "deployments": {DEPLOYMENT: entry}}
            project.put(f"inventory/{host.name}.yaml", {"hosts": {host.name: body}})

    def up(self, scene: Scene, expected: int, *words: str) -> Ran:
        """`deploy up` of rank 0, which means both."""
        return self.brings(scene, expected, "up", *words, *self.project.selection)

    def brings(self, scene: Scene, expected: int, command: str, *words: str) -> Ran:
        """`up` or what ends like it, with all that it said."""
        ran = self.project.deploy("--jsonl", "--yes", command, f"{NAMES[0]}/{DEPLOYMENT}", *words)
        ends = ends_of(ran)
        scene.ran(
            ran,
            gates=ran.gates(),
            notes=[f"{one['host']}: {one['text']}" for one in ran.events if one["event"] == "note"],
            summary="; ".join(f"{host}: {end['summary']}" for host, end in ends.items()),
            fix="; ".join(end["fix"] for end in ends.values() if end.get("fix")),
        )
        scene.check(f"`deploy {command}` of both exits {expected}", ran.code == expected, ran.code)
        return ran

    def launches(self) -> list[dict[str, Any]]:
        """The newest launch of each host."""
        return [host.launch(DEPLOYMENT) for host in self.hosts]

    def alive(self) -> dict[str, dict[str, str]]:
        """Processes of the newest launch by host; those without any are left out."""
        found = {host.name: host.launch(DEPLOYMENT)["processes"] for host in self.hosts}
        return {name: processes for name, processes in found.items() if processes}

    def status(self, scene: Scene) -> dict[str, tuple[str, str]]:
        """State and verdict by host, as `deploy status` tells them."""
        ran = scene.ran(self.project.deploy("--json", "status", "--all"))
        try:
            told = json.loads(ran.out)["hosts"]
            return {
                one["host"]: (str(one["deployments"][0]["state"]),
                              str(one["deployments"][0]["verdict"]))
                for one in told
            }  # fmt: skip
        except (ValueError, KeyError, IndexError) as error:
            return {"error": (f"{type(error).__name__}: {error}", (ran.out + ran.err)[-300:])}

    def ended(self, scene: Scene) -> None:
        """Nothing of the launch is left on either host."""
        left = self.alive()
        scene.check("no process of the launch is left on either host", not left, left)

        def back() -> bool:
            return all(
                host.used_mib() <= base + FLOOR_MIB
                for host, base in zip(self.hosts, self.base_mib, strict=True)
            )

        wait_for(back, 20, 1.0)
        seen = [f"{host.used_mib()} MiB" for host in self.hosts]
        scene.check("the memory of both GPUs is back at its floor", back(), seen)

    def keep_logs(self) -> None:
        """Copies of both logs of the newest launch, without the API key."""
        folder = self.project.log.parent / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        for host in self.hosts:
            seen = host.launch(DEPLOYMENT)
            text = seen["log"].replace(self.project.key, "***")
            (folder / f"{host.name}-{seen['id'] or 'none'}.log").write_text(text)


def ends_of(ran: Ran) -> dict[str, dict[str, Any]]:
    """The last event of each host."""
    return {one["host"]: one for one in ran.events if one["event"] == "run_finished"}
