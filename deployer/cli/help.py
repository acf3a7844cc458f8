"""`deploy help TOPIC`: the sample files are the documentation."""

from __future__ import annotations

from typing import Literal, cast

import click

from deployer.cli.options import Options, common

EXIT_CODES = """\
0    done, or nothing to do
1    a step failed
2    usage, or a bad file
3    unreachable (dark, refused, wrong key, unknown or changed host key)
4    the lock is held by another run
5    a gate failed: the server answers but is not good
6    changes pending (plan --exit-code)
130  interrupted
"""

MIGRATE = """\
deploy migrate SRC DST [--dry-run] [--retire | --keep-source] | [--abort]

SRC serves on one host, DST is an entry of the inventory on another. The model comes up and is
proven on DST while SRC serves; then the traffic moves, and SRC drains and stops.

preflight  looks at both hosts and lists every obstacle at once; nothing is touched
prepare    driver, GPUs, container and venv of DST; the venv is built for its own GPUs
weights    from SRC by ssh or from the Hub, whichever a few measured seconds show faster. The copy
           uses a key that is made for it, may only read the files of the list, and is removed.
           `peer_address` and `peer_port` of an ssh entry say how hosts reach each other. Where
           neither source can be reached from DST, the bytes go through this machine
launch     started and through its gates on DST; a failure ends with 5 and SRC untouched
cutover    moves the traffic, as `cutover` of DST's entry says (else of SRC's):
             router   smg or sglang-router: the new worker in, healthy there, the old one out
             hook     a command on this machine; its environment has DEPLOY_DIRECTION (forward or
                      back), DEPLOY_FROM, DEPLOY_TO (HOST/NAME), DEPLOY_FROM_URL, DEPLOY_TO_URL,
                      DEPLOY_MODEL and DEPLOY_MIGRATION. It may be run twice. With probe_url the
                      gap that clients see is measured and printed
             address  an address of its own moves between the containers (pct set), its MAC address
                      with it; requests that are under way end
             none     (left out) the new endpoint is printed
settle     DST serves through the cut-over for settle_s; if it fails, the traffic goes back
stop       SRC drains for at most drain_s and stops (--keep-source: it does not)
retire     with --retire: SRC's container stops, its GPUs go back to vfio-pci; nothing is deleted

Killed or cut off in any phase, the same command goes on; a journal is kept here and on both hosts,
so another controller goes on too. --abort takes back what was done, in any phase and after the end:
traffic first, then DST is stopped. What DST was given (venv, verified weights, partial files that a
later run resumes) stays on its disk. What held DST's port and was not started by this tool (allowed
by stop.old_server: adopt) is started again with its own words and environment.

A port forward is a rule of some host's firewall, no part of a container's config: a hook changes
it. With nft a map does it in one step, and connections that are open go on to the old server:
    nft add table ip llm
    nft 'add map ip llm to { type inet_service : ipv4_addr; }'
    nft 'add chain ip llm in { type nat hook prerouting priority dstnat; }'
    nft 'add rule ip llm in ip daddr 192.0.2.9 dnat to tcp dport map @to'
The hook, where DEPLOY_TO_URL is http://ADDRESS:30000:
    #!/bin/sh
    address=${DEPLOY_TO_URL#*//}
    ssh root@192.0.2.9 nft -f - <<END
    flush map ip llm to
    add element ip llm to { 30000 : ${address%:*} }
    END
"""


@click.command("help")
@click.argument(
    "topic",
    required=False,
    type=click.Choice(["inventory", "playbook", "lock", "migrate", "exit-codes"]),
)
@common
@click.pass_context
def command(ctx: click.Context, /, options: Options, topic: str | None) -> int:
    """Explain a topic: inventory, playbook, lock, migrate, exit-codes.

    The first three print a commented sample, to begin a file of your own with.
    """
    options.only_talks("help")
    if topic is None:
        click.echo(ctx.find_root().get_help())
    elif topic == "exit-codes":
        click.echo(EXIT_CODES, nl=False)
    elif topic == "migrate":
        click.echo(MIGRATE, nl=False)
    else:
        from deployer.names import help_text

        click.echo(help_text(cast(Literal["inventory", "playbook", "lock"], topic)), nl=False)
    return 0
