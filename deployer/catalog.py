"""The inventory folder and its playbooks as one checked whole; words become deployments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deployer import crosscheck, crosscheck_machines, crosscheck_nodes, crosscheck_playbook
from deployer.catalog_files import (
    guest_keys,
    inventory_files,
    lock_of,
    with_absolute_package,
    with_absolute_paths,
)
from deployer.catalog_limit import check_limit, limited
from deployer.catalog_nodes import Nodes
from deployer.deployment import Deployment, Node, Peer, worker_url
from deployer.document import Document, load
from deployer.errors import UsageError
from deployer.inventory import DeploymentEntry, Host, InventoryFile
from deployer.names import did_you_mean, like, listed, same_url, shown
from deployer.playbook import Playbook
from deployer.validation import validate


@dataclass(frozen=True)
class LoadedPlaybook:
    """A playbook with its file and the text of its engine lock."""

    document: Document
    playbook: Playbook
    lock_text: str


@dataclass(frozen=True)
class Catalog:
    """All hosts of an inventory folder. Playbooks are read when a deployment of theirs is selected.

    Paths in `ssh` are absolute: relative ones of the file belong to the inventory folder.
    """

    inventory_dir: Path
    hosts: Mapping[str, Host]
    documents: Mapping[str, Document]
    """Host name -> the file that describes it."""
    _playbooks: dict[str, LoadedPlaybook] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, inventory_dir: Path) -> Catalog:
        """Reads and checks all `*.yaml`/`*.yml` of the folder.

        Raises UsageError when there is no such folder or no file in it, DocumentError for a file.
        """
        hosts: dict[str, Host] = {}
        documents: dict[str, Document] = {}
        for path in inventory_files(inventory_dir):
            document = load(path)
            for name, host in validate(document, InventoryFile).hosts.items():
                if name in hosts:
                    raise document.error(
                        ("hosts", name),
                        f"host `{name}` is described twice; the other place is "
                        f"{documents[name].where(('hosts', name), key=True)}",
                        fix="remove or rename one of the two",
                        key=True,
                    )
                crosscheck.check_host(document, name, host)
                hosts[name] = with_absolute_paths(host, inventory_dir.resolve())
                documents[name] = document
        crosscheck_machines.check_machines(hosts, documents)
        return cls(inventory_dir, hosts, documents)

    @property
    def playbook_dir(self) -> Path:
        """`playbooks/` beside the inventory folder."""
        return self.inventory_dir.resolve().parent / "playbooks"

    def host(self, name: str) -> Host:
        """The host of this name. Raises UsageError with the nearest name."""
        if name not in self.hosts:
            raise UsageError(
                f"no host `{name}` in the inventory{did_you_mean(name, self.hosts)}",
                where=shown(self.inventory_dir),
                fix=f"hosts: {listed(self.hosts)}",
            )
        return self.hosts[name]

    def select(
        self,
        words: Sequence[str],
        all_: bool = False,
        variant: str | None = None,
        limit: Sequence[str] = (),
        whole: bool = True,
        bare: bool = False,
        launches: bool = True,
    ) -> list[Deployment]:
        """The deployments that HOST and HOST/NAME words mean, each once, in the order named.

        A word that means one node of a server means all of them, in rank order, if `whole`.

        `variant` overrides the inventory's; `limit` leaves only what its patterns are like, see
        `names.like`. `bare`: a host without deployments is passed over, see `undeployed`. Raises
        UsageError for a word or variant that means nothing, DocumentError for a playbook or lock
        that is missing or wrong. `launches` False: what the playbook says is not launched, and a
        variant of the inventory that it lacks is no error.
        """
        chosen = self.named(words, all_, limit, bare)
        selected = [self._deployment(host, name, variant, launches) for host, name in chosen]
        if whole:
            selected = self._whole(selected, variant, launches, limited=bool(limit))
        for host in dict.fromkeys(want.host_name for want in selected):
            crosscheck.check_ports(self.documents[host], host, self._ports(host))
        return selected

    def named(
        self,
        words: Sequence[str],
        all_: bool = False,
        limit: Sequence[str] = (),
        bare: bool = False,
    ) -> list[tuple[str, str]]:
        """(host, name) of what `select` of the same words means, without a look at any playbook.

        Raises UsageError.
        """
        if all_ and words:
            raise UsageError(
                f"--all and {listed(words)} do not go together", fix="use one of the two"
            )
        if not all_ and not words:
            raise UsageError(
                "no target named", fix=f"name HOST or HOST/NAME, or --all; hosts: {self._listed()}"
            )
        if limit:
            check_limit(limit, self.hosts, self.inventory_dir)
        chosen: dict[tuple[str, str], DeploymentEntry] = {}
        for word in self.hosts if all_ else words:
            chosen.update(self._meant(word, quiet=all_ or bare))
        if not chosen and not bare:
            raise UsageError(
                "no host of the inventory has deployments",
                where=shown(self.inventory_dir),
                fix="add `deployments:` to a host; see `deploy help inventory`",
            )
        if limit:
            chosen = limited(chosen, limit, bare=bare)
        return list(chosen)

    def take(self, name: str, loaded: LoadedPlaybook) -> None:
        """Uses this in place of the file of playbook `name`."""
        self._playbooks[name] = loaded

    def undeployed(
        self, words: Sequence[str], all_: bool = False, limit: Sequence[str] = ()
    ) -> list[str]:
        """The hosts without deployments among those that `select` of the same words passes over."""
        return [
            word
            for word in dict.fromkeys(self.hosts if all_ else words)
            if word in self.hosts and not self.hosts[word].deployments and like(limit, (word,))
        ]

    def playbook(self, name: str, asked_by: Document, at: tuple[str | int, ...]) -> LoadedPlaybook:
        """The playbook `name` with its lock; `asked_by`/`at` is the key that names it."""
        if name not in self._playbooks:
            path = self.playbook_dir / f"{name}.yaml"
            if not path.exists():
                known = [file.stem for file in sorted(self.playbook_dir.glob("*.yaml"))]
                raise asked_by.error(
                    at,
                    f"playbook `{name}` does not exist: looked for "
                    f"{shown(path)}{did_you_mean(name, known)}",
                    fix=f"playbooks there: {listed(known)}",
                )
            document = load(path)
            playbook = validate(document, Playbook)
            crosscheck_playbook.check_playbook(document, playbook)
            playbook = with_absolute_package(playbook, self.playbook_dir)
            self._playbooks[name] = LoadedPlaybook(document, playbook, lock_of(document, playbook))
        return self._playbooks[name]

    def _listed(self) -> str:
        return listed(self.hosts)

    def _meant(self, word: str, *, quiet: bool) -> dict[tuple[str, str], DeploymentEntry]:
        """What one word means; `quiet`: a host without deployments is passed over."""
        host_name, slash, name = word.partition("/")
        host = self.host(host_name)
        if not slash:
            if not host.deployments and not quiet:
                raise UsageError(
                    f"host `{host_name}` has no deployments",
                    where=self.documents[host_name].where(("hosts", host_name), key=True),
                    fix="add `deployments:` to it; see `deploy help inventory`",
                )
            return {(host_name, label): entry for label, entry in host.deployments.items()}
        if name not in host.deployments:
            raise UsageError(
                f"host `{host_name}` has no deployment `{name}`"
                f"{did_you_mean(name, host.deployments)}",
                where=self.documents[host_name].where(("hosts", host_name), key=True),
                fix=f"deployments of {host_name}: {listed(host.deployments)}",
            )
        return {(host_name, name): host.deployments[name]}

    def _deployment(
        self, host_name: str, name: str, variant: str | None, launches: bool
    ) -> Deployment:
        host, document = self.hosts[host_name], self.documents[host_name]
        entry = host.deployments[name]
        at = ("hosts", host_name, "deployments", name, "playbook")
        loaded = self.playbook(entry.playbook, document, at)
        known = [rung.name for rung in loaded.playbook.variants]
        asked = variant or entry.variant
        deployment = Deployment(
            host_name=host_name,
            name=name,
            host=host,
            entry=entry,
            playbook=_drained(entry, loaded.playbook),
            playbook_name=entry.playbook,
            lock_text=loaded.lock_text,
            variant=asked if launches or asked in known else None,
            guest_keys=guest_keys(document, host_name, host, entry.container),
            peers=self._peers(host_name, name, loaded.playbook),
            node=self._node(host_name, name, loaded),
        )
        if launches:
            crosscheck.check_variant(deployment, document)
        if deployment.node is not None:
            crosscheck_nodes.check_node(deployment, document)
        if variant and variant not in known:
            raise UsageError(
                f"{deployment.id}: playbook {entry.playbook} has no variant "
                f"`{variant}`{did_you_mean(variant, known)}",
                where=shown(loaded.document.path),
                fix=f"variants: {listed(known)}",
            )
        return deployment

    def _whole(
        self, selected: Sequence[Deployment], variant: str | None, launches: bool, *, limited: bool
    ) -> list[Deployment]:
        """With the other nodes of each, in rank order. Raises UsageError for a half of --limit."""
        found: dict[str, Deployment] = {}
        named = {want.id for want in selected}
        for want in selected:
            hosts = want.node.hosts if want.node is not None else (want.host_name,)
            lacking = [
                f"{host}/{want.name}" for host in hosts if f"{host}/{want.name}" not in named
            ]
            if limited and lacking:
                raise UsageError(
                    f"--limit leaves {want.id} without {listed(lacking)}: they are one server",
                    fix="name all of its nodes, or none",
                )
            for host in hosts:
                one = want if host == want.host_name else None
                found.setdefault(
                    f"{host}/{want.name}",
                    one or self._deployment(host, want.name, variant, launches),
                )
        return list(found.values())

    def _node(self, host_name: str, name: str, loaded: LoadedPlaybook) -> Node | None:
        """Its place among the playbook's nodes. Raises DocumentError when they do not fit."""
        if loaded.playbook.nodes is None:
            return None
        nodes = Nodes(name, loaded.document, loaded.playbook, self.hosts, self.documents)
        return nodes.place_of(host_name)

    def _peers(self, host_name: str, name: str, playbook: Playbook) -> tuple[Peer, ...]:
        """The other replicas: of the same playbook, behind the same router."""
        mine = self.hosts[host_name].deployments[name]
        if mine.replica is None:
            return ()
        return tuple(
            Peer(f"{other}/{label}", worker_url(host, entry, playbook))
            for other, host in self.hosts.items()
            for label, entry in host.deployments.items()
            if entry.replica is not None
            and (other, label) != (host_name, name)
            and entry.playbook == mine.playbook
            and same_url(entry.replica.router.url, mine.replica.router.url)
        )

    def _ports(self, host_name: str) -> Iterable[tuple[str, int | None, int]]:
        """Ports of the host's deployments, where they are known without reading more playbooks."""
        for label, entry in self.hosts[host_name].deployments.items():
            loaded = self._playbooks.get(entry.playbook)
            port = entry.port or (loaded.playbook.serve.port if loaded else None)
            if port is not None:
                yield label, entry.container, port


def _drained(entry: DeploymentEntry, playbook: Playbook) -> Playbook:
    """A replica's server is stopped only when its requests had the time to end."""
    if entry.replica is None or entry.replica.drain_s <= playbook.stop.drain_s:
        return playbook
    stop = playbook.stop.model_copy(update={"drain_s": entry.replica.drain_s})
    return playbook.model_copy(update={"stop": stop})
