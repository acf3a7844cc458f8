"""May the download start? Obstacles, strangers at work, room, and what other clients left. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployer.agents.fetch.claims import claim, foreign, plain
from deployer.agents.fetch.look import OWN_SUFFIXES
from deployer.agents.fetch.partials import Partial
from deployer.deployment import Deployment
from deployer.model import Plan
from deployer.state import ManifestFile
from deployer.steps.shards_facts import Room, ShardsFact
from deployer.steps.shards_figures import size_text

INODES_SPARE = 100
OWN_CLIENTS = ("hf-xet", "rsync")


@dataclass(frozen=True)
class Leftovers:
    """Partial files of other clients, judged against the list."""

    adopted: dict[str, Partial]
    """Path of a file -> the partial that the agent takes over."""
    useless: tuple[tuple[str, int, str], ...]
    """(path, bytes on the disk, why), of other clients and of our own earlier lists."""

    @property
    def useless_bytes(self) -> int:
        """What cleaning frees."""
        return sum(used for _, used, _ in self.useless)

    def useless_text(self, target: str) -> str:
        """One line for people, '' when there are none."""
        if not self.useless:
            return ""
        count = len(self.useless)
        return (
            f"{count} partial file{'s' if count > 1 else ''}, {size_text(self.useless_bytes)}, "
            f"useless: `deploy doctor {target} --clean-partials` removes "
            f"{'them' if count > 1 else 'it'}"
        )

    def adopted_text(self) -> str:
        """One line for people, '' when nothing is taken over."""
        if not self.adopted:
            return ""
        clients = ", ".join(sorted({one.client for one in self.adopted.values()}))
        sizes = sum(one.prefix for one in self.adopted.values())
        count = len(self.adopted)
        return (
            f"{count} partial file{'s' if count > 1 else ''} ({clients}), {size_text(sizes)}, "
            f"{'are' if count > 1 else 'is'} taken over"
        )


def leftovers(fact: ShardsFact, files: Sequence[ManifestFile], own: bool = True) -> Leftovers:
    """What the agent will take over, and what `--clean-partials` would remove.

    `own`: with what our own children left; a download that is still to come cleans that itself.
    """

    def there(file: ManifestFile) -> int:
        return file.size if fact.verified(file) else fact.present(file)

    adopted, left = claim(fact.partials, files, there)
    listed = {file.path: file for file in files}
    useless: list[tuple[str, int, str]] = []
    for one, why in left:
        if one.client == "aria2" and one.name in listed and fact.verified(listed[one.name]):
            useless.append((f"{one.name}.aria2", fact.files[f"{one.name}.aria2"][0], why))
        elif own or one.client not in OWN_CLIENTS:
            useless.append((one.path, one.used, why))
    for name, (size, _) in fact.files.items():
        suffix = next((end for end in OWN_SUFFIXES if name.endswith(end)), "")
        base = name[: -len(suffix)] if suffix else ""
        if not base or name in listed:
            continue
        if base not in listed:
            useless.append((name, size, "the list does not name its file"))
        elif fact.verified(listed[base]):
            useless.append((name, size, f"{base} is verified"))
    # What is reached through a symlink is not ours to remove.
    mine = [row for row in useless if not _linked(fact, row[0])]
    return Leftovers(adopted, tuple(mine))


def _linked(fact: ShardsFact, path: str) -> bool:
    return any(path == link or path.startswith(f"{link}/") for link in fact.links)


def obstacle(want: Deployment, fact: ShardsFact, left: Sequence[ManifestFile] = ()) -> Plan | None:
    """What stands in the way of the folder itself, and of those that `left` needs."""
    path = want.playbook.model.path
    if fact.obstacle:
        return Plan.blocked(
            plain(fact.obstacle), f"move it away, or choose another model.path than {path}"
        )
    readonly = [room for room in _rooms_used(fact) if room.readonly]
    if readonly:
        return Plan.blocked(
            f"the file system of {plain(readonly[0].at)} is mounted read-only",
            "mount it read-write, or choose another model.path",
        )
    if not fact.writable:
        return Plan.blocked(
            f"{plain(fact.near)} is not writable", "check the mount and the rights of model.path"
        )
    folders = {"", *(parent for file in left for parent in _parents(file.path))}
    for folder in sorted(folders):
        where = plain(f"{path}/{folder}") if folder else path
        if folder in fact.problems:
            return Plan.blocked(
                f"{where}: {fact.problems[folder]}", f"check the rights and the content of {where}"
            )
        if folder in fact.files:
            return Plan.blocked(f"{where} is a file, and a folder is needed there", "move it away")
    return None


def _parents(path: str) -> list[str]:
    """`a/b` and `a` of `a/b/c`."""
    words = path.split("/")
    return ["/".join(words[:count]) for count in range(1, len(words))]


def leads_out(want: Deployment, fact: ShardsFact, left: Sequence[ManifestFile]) -> Plan | None:
    """A symlinked sub-folder that would take files out of the model's folder."""
    for link, real in fact.outside.items():
        if any(file.path.startswith(f"{link}/") for file in left):
            path = f"{want.playbook.model.path}/{link}"
            return Plan.blocked(
                f"{plain(path)} is a link that leads out of the model's folder, to {plain(real)}",
                "put a real folder or a mount point there, or let model.path be the link",
            )
    return None


def stranger(want: Deployment, fact: ShardsFact, files: Sequence[ManifestFile]) -> Plan | None:
    """A live download of somebody else in the same folder."""
    names = {file.path for file in files}
    busy = [
        one
        for one in fact.holders
        if one.pid != fact.running and foreign(one, names, ours=bool(fact.running))
    ]
    if not busy:
        return None
    who = "; ".join(f"pid {one.pid} ({one.command}) has {plain(one.path)} open" for one in busy)
    return Plan.blocked(
        f"another program downloads into {want.playbook.model.path}: {who}",
        "wait for it, or stop it yourself; what it has fetched is taken over then",
    )


def no_room(
    want: Deployment, fact: ShardsFact, left: Sequence[ManifestFile], found: Leftovers
) -> Plan | None:
    """Bytes and inodes, on each file system that gets any of the files.

    Counted is what a file ends with. hf-xet needs up to a second copy of a file for a moment: the
    agent uses that method only when there is room for it, so it is not asked for here.
    """
    needs: dict[str, int] = {}
    counts: dict[str, int] = {}
    for file in left:
        key = fact.room_of(file.path)
        counts[key] = counts.get(key, 0) + 1
        needs[key] = needs.get(key, 0) + file.size - _there(fact, file, key, found)
    for key, need in needs.items():
        if blocked := _short(want, fact, key, need, found):
            return blocked
        room = fact.rooms.get(key)
        files = counts[key] + INODES_SPARE
        if room is not None and room.inodes_total and room.inodes < files:
            return Plan.blocked(
                f"{plain(room.at)}: only {room.inodes} inodes free, {files} needed",
                f"remove small files from the file system of {plain(room.at)}",
            )
    return None


def lacking(fact: ShardsFact, left: Sequence[ManifestFile], found: Leftovers) -> int:
    """Bytes to fetch."""
    have = 0
    for file in left:
        one = found.adopted.get(file.path)
        have += max(fact.present(file), one.prefix if one else 0)
    return sum(file.size for file in left) - have


def _there(fact: ShardsFact, file: ManifestFile, key: str, found: Leftovers) -> int:
    """Bytes that the file will not need on its file system, for it has them there already."""
    one = found.adopted.get(file.path)
    if one is None or fact.room_of(one.path) != key:
        return fact.present(file)
    # What lies beyond the prefix is cut off, and its blocks are written anew.
    return max(fact.present(file), one.prefix, min(one.used, file.size))


def _short(
    want: Deployment, fact: ShardsFact, key: str, need: int, found: Leftovers
) -> Plan | None:
    margin, room = want.playbook.download.margin_bytes, fact.rooms.get(key)
    if room is None or not need or need + margin <= room.free:
        return None
    missing = need + margin - room.free
    path = want.playbook.model.path
    at = path if not key or key == fact.places.get("") else plain(room.at)
    fix = f"free {size_text(missing)} at {plain(room.at)}"
    if found.useless_bytes >= missing:
        fix += f" (`deploy doctor {want.id} --clean-partials` frees "
        fix += f"{size_text(found.useless_bytes)})"
    else:
        fix += f" (`deploy gc {want.id}` shows what of ours may go)"
    larger = [
        f"{other} ({size_text(free)} free)"
        for other, free in fact.elsewhere
        if free > need + margin
    ]
    if larger:
        fix += f", or set model.path below {' or '.join(larger)}"
    return Plan.blocked(
        f"{at}: {size_text(room.free)} free, {size_text(need)} to download and "
        f"{size_text(margin)} margin needed",
        fix,
    )


def _rooms_used(fact: ShardsFact) -> list[Room]:
    keys = dict.fromkeys(fact.places.values())
    return [fact.rooms[key] for key in keys if key in fact.rooms]
