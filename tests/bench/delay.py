"""A real round trip: two TUN devices and a userspace delayer, so that TCP is end to end.

A delaying TCP proxy would end TCP locally and hide Nagle and delayed-ACK stalls. Needs root.
The client runs in its own network namespace; `near` is its address there.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x0001 | 0x1000
NAMESPACE = "deployer-bench"
FAR, NEAR = "10.231.7.1", "10.231.7.2"


def _tun(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN_NO_PI))
    return handle


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _forward(one: int, other: int, delay_s: float, stop: threading.Event) -> None:
    queue: list[tuple[float, int, int, bytes]] = []
    count = 0
    while not stop.is_set():
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else 0.2
        ready, _, _ = select.select([one, other], [], [], min(wait, 0.2))
        now = time.monotonic()
        for handle in ready:
            packet = os.read(handle, 65536)
            count += 1
            heapq.heappush(queue, (now + delay_s, count, other if handle == one else one, packet))
        while queue and queue[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(queue)
            with contextlib.suppress(OSError):
                os.write(target, packet)


@contextlib.contextmanager
def delayed_namespace(rtt_s: float) -> Iterator[list[str]]:
    """Yields the argv prefix that runs a command behind `rtt_s` seconds of round trip."""
    subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)
    far, near = _tun("dplfar"), _tun("dplnear")
    stop = threading.Event()
    rules = [
        ["-I", "FORWARD", "-i", "dplfar", "-j", "ACCEPT"],
        ["-I", "FORWARD", "-o", "dplfar", "-j", "ACCEPT"],
    ]
    try:
        _ip("netns", "add", NAMESPACE)
        _ip("link", "set", "dplnear", "netns", NAMESPACE)
        _ip("addr", "add", FAR, "peer", NEAR, "dev", "dplfar")
        _ip("link", "set", "dplfar", "up")
        inside = ["netns", "exec", NAMESPACE, "ip"]
        _ip(*inside, "addr", "add", NEAR, "peer", FAR, "dev", "dplnear")
        _ip(*inside, "link", "set", "dplnear", "up")
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "route", "add", "default", "via", FAR)
        for rule in rules:
            subprocess.run(["iptables", *rule], check=True, capture_output=True)
        worker = threading.Thread(target=_forward, args=(far, near, rtt_s / 2, stop), daemon=True)
        worker.start()
        yield ["ip", "netns", "exec", NAMESPACE]
        stop.set()
        worker.join(2)
    finally:
        stop.set()
        for rule in rules:
            subprocess.run(["iptables", "-D", *rule[1:]], check=False, capture_output=True)
        os.close(far)
        os.close(near)
        subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)
