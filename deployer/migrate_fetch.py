"""The weights of a migration: from the faster source, or through this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from deployer.deployment import Deployment
from deployer.errors import DeployError, Unreachable
from deployer.events import Progress
from deployer.migrate_pair import Pair
from deployer.migrate_relay import relay
from deployer.migrate_weights import Lending, Rate, choose, measure, with_source
from deployer.model import PlanState
from deployer.state import Manifest


class Fetch:
    """The phase `weights`. `bring`: the shards step, with the sources in their order."""

    def __init__(self, pair: Pair, bring: Callable[[Deployment | None], object]) -> None:
        self.pair, self.bring = pair, bring
        self.source, self.destination = pair.source, pair.destination

    def fetch(self) -> None:
        """From the faster source; the key for the copy is gone when it is over, well or not."""
        side = self.destination
        facts = side.gather()
        [shards] = side.only("shards")
        manifest = side.own.manifest
        lending = Lending(self.source, side, self.pair.record.id)
        plan = shards.plan(side.want, facts, side.own)
        if plan.state is PlanState.NOTHING or manifest is None:
            self.end_lending(lending)
            self.bring(None)
            return
        want, record = side.want, self.pair.record
        record.lending = True
        self.pair.save()
        try:
            peer = lending.open(manifest)
        except Unreachable:
            raise
        except DeployError as error:
            side.note("weights", f"no copy from {self.source.want.id}: {error.what}", "warning")
            if record.weights_from != "hub":
                rate = measure(side, want, manifest, "hub")
                record.weights_from = "hub" if rate.bytes_per_s > 0 else "relay"
        else:
            # The last way out is no choice: what was unreachable then may be there now.
            if record.weights_from in ("", "relay"):
                record.weights_from = self.faster(with_source(want, peer, "peer"))
            want = with_source(want, peer, record.weights_from)
        self.pair.save()
        try:
            if self.pair.record.weights_from == "relay":
                self.relay(manifest)
            self.bring(want)
        except Unreachable:
            # The download goes on there by itself and needs the key; the next run ends both.
            raise
        except DeployError as error:
            self.end_lending_after(error, lending)
            raise
        self.end_lending(lending)

    def faster(self, want: Deployment) -> str:
        """Measures both sources."""
        side, manifest = self.destination, self.destination.own.manifest
        if manifest is None:
            return "hub"
        rates: dict[str, Rate] = {}
        for source in ("peer", "hub"):
            rates[source] = measure(side, want, manifest, source)
            self.pair.record.figures[f"{source}_bytes_per_s"] = rates[source].bytes_per_s
        chosen = choose(rates["peer"], rates["hub"])
        first = {
            "peer": "the copy comes first",
            "hub": "the Hub comes first",
            "relay": "so it goes through this machine",
        }[chosen]
        told = f"from {self.source.want.id}: {rates['peer']}; from the Hub: {rates['hub']}; {first}"
        side.note("weights", told)
        return chosen

    def relay(self, manifest: Manifest) -> None:
        """Through this machine, where nothing else goes; the shards step then judges it."""
        side, source = self.destination, self.source
        began = time.monotonic()

        def progress(done: int, total: int) -> None:
            where = (side.want.host_name, side.want.id, "weights")
            self.pair.bus.emit(Progress(*where, "relay", float(done), float(total), "B"))

        sent = relay(
            (source.guest, source.want.playbook.model.path),
            (side.guest, side.want.playbook.model.path),
            list(manifest.files),
            progress,
        )
        self.pair.record.figures["relay_bytes_per_s"] = sent / max(time.monotonic() - began, 1e-3)

    def end_lending(self, lending: Lending) -> None:
        """No key, no agent and no authorization are left."""
        if self.pair.record.lending:
            lending.close()
            self.pair.record.lending = False
            self.pair.save()

    def end_lending_after(self, error: DeployError, lending: Lending) -> None:
        """The same when the copy has failed, whose error stays the one that is told."""
        try:
            self.end_lending(lending)
        except DeployError as other:
            error.add(f"and the key for the copy is still on the source: {other.what}")
