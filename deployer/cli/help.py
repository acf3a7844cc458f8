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
deploy migrate SRC DST [--dry-run] [--retire | --keep-source] | --abort

SRC serves on one host; DST, of the same model and served name, is an entry of the inventory on
another. DST comes up and is proven while SRC serves; then the traffic moves, and SRC drains and
stops. HOST is enough for HOST/NAME where it has one deployment, or one of SRC's name.

Phases
preflight  looks at both hosts and lists every obstacle at once; nothing is touched
prepare    driver, GPUs, container and venv of DST; the venv is built for its own GPUs
weights    from SRC by ssh or from the Hub, whichever a few measured seconds show faster. The copy
           uses a key that is made for it, may only read the files of the list, and is removed.
           `peer_address` and `peer_port` of an ssh entry say how hosts reach each other. Where
           neither source can be reached from DST, the bytes go through this machine
launch     started and through its gates on DST; a failure ends with 5 and SRC untouched
cutover    moves the traffic in the first way that is named: by `cutover` of DST's entry, of SRC's,
           by the router of a `replica` entry. Keys in brackets have these values when left out:
             router   url, via (controller), api_key_env, ready_s (120): smg or sglang-router; the
                      new worker in, healthy there within ready_s, the old one out
             hook     command, timeout_s (60), probe_url: a program on this machine, see below
             address  ip, interface (net1), probe_url: an address of its own moves between the
                      containers (pct set) with its MAC address; requests under way end
             none     (left out) the new endpoint is printed
settle     DST serves through the cut-over for settle_s (60); if it fails, the traffic goes back
stop       SRC gets at most drain_s (300) for the requests that it has, then stops
retire     with --retire: SRC's container stops, its GPUs go back to vfio-pci; nothing is deleted

Options
--dry-run      the steps on DST, what follows, and every obstacle; with --abort: what it would do
--retire       as above; the same command with it does so after the end of a migration, too. A SRC
               that serves as proven again by then moves anew; anything else that runs there is
               an obstacle
--keep-source  SRC is not stopped: it goes on without traffic; `deploy down SRC` ends it later.
               After the cut-over it also ends a migration whose SRC is gone. The later of the two
               words counts
--abort        takes back what was done, in any phase and after the end: traffic first (SRC is
               started again as it was launched if it is stopped), then DST is stopped. While one
               side is dark it does the other, ends with 3 and says what is left: the same again
               when it can be reached. A SRC that is done with may move elsewhere meanwhile
On a terminal it asks before it acts (--yes: it does not); --json acts only with --yes.

Killed or cut off in any phase, the same command goes on; a journal is kept here and on both hosts
(/var/lib/deployer/migrations), so another controller goes on too. After --abort, what DST was given
(venv, verified weights, partial files that a later run resumes) stays on its disk. What held DST's
port and was not started by this tool (allowed by stop.old_server: adopt) is started again with its
own words and environment.

Exit code 0: done. 1: a step failed, or obstacles (2, 3 or 4 where all are of that kind). 3: a host
or the router was not reached. 4: a host's lock is held. 5: DST does not pass its gates, or failed
after the cut-over and the traffic is back at SRC.

The hook is started without a shell in the folder where `deploy` runs; a name without / is looked
for in PATH. Its input is empty; what it prints is shown when it has ended. Status 0 says that new
requests go to DEPLOY_TO from now on. Another status, or timeout_s (its process group is ended),
ends the run: the same command starts the hook again, --abort starts it with `back`. So it may run
twice, and `back` may follow a `forward` that was cut off. Its environment is that of `deploy`, and
DEPLOY_DIRECTION  forward; or back: with --abort, or when DST fails after the cut-over
DEPLOY_FROM       HOST/NAME that loses the traffic: SRC, with `back` DST
DEPLOY_TO         HOST/NAME that gets it
DEPLOY_FROM_URL   the server of DEPLOY_FROM, without /v1: worker_url of its entry, else url, else
                  http://ADDRESS:PORT
DEPLOY_TO_URL     the same of DEPLOY_TO
DEPLOY_MODEL      the name that clients ask for (model.served_name)
DEPLOY_MIGRATION  the migration's id, the same in all its runs
probe_url is what clients use, without /v1: its /v1/models is asked every 50 ms during the move, and
the gap is printed (404 and 5xx are no answer). It must answer before anything is moved. When it
does not 30 s after the move, the traffic goes back.

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
    metavar="[TOPIC]",
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
