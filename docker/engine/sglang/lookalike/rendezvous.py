"""How the ranks of several nodes find each other at `--dist-init-addr`, and miss each other.

As torch's TCP store: rank 0 listens and waits for all, the others try until it is there, both for
`--dist-timeout` seconds (600). Afterwards each keeps one connection to rank 0, in place of gloo's
and NCCL's: a rank whose connection ends raises what gloo raises at the next broadcast of requests,
which SGLang's schedulers do all the time.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

from sglang.lookalike import logs

TIMEOUT_S = 600
RETRY_S = 0.2
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
WHERE = (
    '  File "/srv/venv/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 3934, '
    "in run_scheduler_process\n    scheduler.run_event_loop()"
)


class DistNetworkError(RuntimeError):
    """As torch names it."""


class DistStoreError(RuntimeError):
    """As torch names it."""


DistNetworkError.__module__ = DistStoreError.__module__ = "torch.distributed"


def place(address: str) -> tuple[str, int]:
    """ADDRESS:PORT, with brackets round IPv6."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(args: Any, rank: int, world: int) -> list[socket.socket]:
    """Returns when all ranks are there, with the connections of this one."""
    where = place(args.dist_init_addr)
    timeout = args.dist_timeout or TIMEOUT_S
    ends = time.monotonic() + timeout
    if rank == 0:
        return _gather(where[1], world, ends, timeout)
    while True:
        try:
            peer = socket.create_connection(where, timeout=5)
            break
        except OSError:
            if time.monotonic() >= ends:
                raise DistNetworkError(
                    f"The client socket has timed out after {timeout * 1000}ms while trying to "
                    f"connect to ({where[0]}, {where[1]})."
                ) from None
            time.sleep(RETRY_S)
    peer.settimeout(max(0.1, ends - time.monotonic()))
    try:
        if not peer.recv(1):
            raise DistNetworkError("failed to recv, got 0 bytes")
    except TimeoutError:
        raise DistStoreError(f"wait timeout after {timeout * 1000}ms, keys: /worker/0") from None
    except ConnectionError:
        raise DistNetworkError("failed to recv, got 0 bytes") from None
    peer.settimeout(None)
    return [peer]


def _gather(port: int, world: int, ends: float, timeout: int) -> list[socket.socket]:
    try:
        server = socket.create_server(("", port))  # on all addresses, as torch does
    except OSError as error:
        raise DistNetworkError(
            "The server socket has failed to listen on any local network address. "
            f"port: {port}, useIpv6: false, code: {-(error.errno or 98)}, name: EADDRINUSE, "
            "message: address already in use"
        ) from None
    peers: list[socket.socket] = []
    with server:
        while len(peers) < world - 1:
            server.settimeout(max(0.1, ends - time.monotonic()))
            try:
                peers.append(server.accept()[0])
            except TimeoutError:
                raise DistStoreError(
                    f"Timed out after {timeout + 1} seconds waiting for clients. "
                    f"{len(peers) + 1}/{world} clients joined."
                ) from None
    for peer in peers:
        peer.settimeout(None)
        peer.sendall(b"!")
    return peers


def watch(peers: list[socket.socket], parent: int) -> None:
    """From now on the loss of a peer ends this server, as an exception of the event loop does."""
    once = threading.Lock()
    for peer in peers:
        threading.Thread(target=_missed, args=(peer, parent, once), daemon=True).start()


def _missed(peer: socket.socket, parent: int, once: threading.Lock) -> None:
    host, port = peer.getpeername()[:2]
    name = f"{host}:{port}"
    try:
        while peer.recv(1):
            pass
    except OSError:
        pass  # reset: the same
    if once.acquire(blocking=False):
        logs.say(
            "Scheduler hit an exception: Traceback (most recent call last):\n"
            f"{WHERE}\nRuntimeError: {GLOO} [{name}]\n"
        )
        os.kill(parent, signal.SIGQUIT)
