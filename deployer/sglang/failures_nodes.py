"""Failures between the ranks of one server, of several hosts above all. Data.

Texts of torch 2.x (TCPStore, gloo) and NCCL 2.2x. Read top down, as `failure_rules` tells.
"""

from __future__ import annotations

from deployer.sglang.failure_rule import Rule, rule

NODES: tuple[Rule, ...] = (
    rule(
        "port-in-use",
        r"server socket has failed to listen",
        "the port at which the ranks meet is taken: `ss -tlnp` where rank 0 runs tells its owner; "
        "stop it, or choose another serve.dist_port (serve.args nccl-port on one host)",
    ),
    rule(
        "rank-address-unknown",
        r"(?:DistNetworkError: .*|(?<!IPv6 ))network addresses of \(.*\) cannot be retrieved",
        "this target does not know the name of rank 0's host: write `node_address:` of rank 0 in "
        "the inventory as an IP address",
        passing=True,
    ),
)
"""Before all others."""

PEERS: tuple[Rule, ...] = (
    rule(
        "rank-address-loopback",
        r"gloo/transport/.* \[?127\.\d+\.\d+\.\d+\]?:\d+: Connection refused",
        "a host's own name leads to 127.x.x.x, which the other nodes cannot reach: correct "
        "/etc/hosts there, or set serve.env GLOO_SOCKET_IFNAME",
        passing=True,
    ),
    rule(
        "ranks-no-route",
        r"(?:socket\w*Connect|\[c10d\]|gloo/transport/|NET/Socket).*"
        r"(?:No route to host|Network is unreachable)",
        "the nodes do not reach each other: open all ports between them (NCCL takes any above "
        "1024), or name the network card that they share in serve.env NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME",
        passing=True,
    ),
    rule(
        "distributed-timeout",
        r"ncclRemoteError|remote process exited"
        r"|gloo/transport/\S+ (?:Connection closed by peer|.*reset by peer)"
        r"|gloo/transport/\S+ (?:connect \S+ )?Connection refused"
        r"|[Ff]ailed to check the \"should dump\" flag on TCPStore",
        "another rank is gone, or cannot be reached: see which one died first (`deploy logs` of "
        "each node)",
        passing=True,
    ),
)
"""Behind what a rank of this node says of an end of its own: in `failures_program`."""
