"""
Storage nodes change hands: from Tahoe-LAFS to PipeGrid, and back.

Commands are those of docs/how-to-replace-a-node.md. All the time one gateway of Tahoe-LAFS runs, which is
told nothing: it has to find every server again, and all that was ever stored.
"""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.interop.gateway_records import (
    STRANGER,
    STRANGERS,
    ShareRecord,
    age,
    plant,
    read_record,
    records,
)
from tests.interop.gateway_world import Kind, Protocol, World, patiently
from tests.interop.processes import until

OLDER_S = 10 * 86400
PASSING = {"announcement-seqnum", "running.process", "running.process.lock"}
"""What changes with every start, or is there only while a node of Tahoe-LAFS runs."""
MADE_BY_TAHOE = {
    "private/api_auth_token",
    "private/introducer_default_cache.yaml",
    "private/logport.furl",
}
"""What that node makes anew with every start."""


class Takeover:
    """
    A grid whose servers change hands.

    Args:
        world: servers of either kind, which run; as many as shares are made.
        protocol: that the gateway speaks.
    """

    def __init__(self, world: World, protocol: Protocol, seed: str) -> None:
        self._world = world
        self._random = random.Random(seed)
        self.gateway = world.start_gateway(protocol)
        self._files: dict[str, bytes] = {}
        self._mutable: list[str] = []
        self._directory = ""
        world.until_found(self.gateway)

    def store(self) -> None:
        """Put files of all kinds, and link one into a directory; the first time, that is made."""
        for size in (200, 56_000, 1_200_000):
            data = self._random.randbytes(size)
            self._files[self._put(data)] = data
        for kind in ("SDMF", "MDMF"):
            data = self._random.randbytes(20_000)
            cap = self._put(data, f"?format={kind}")
            self._files[cap] = data
            self._mutable.append(cap)
        if not self._directory:
            self._directory = self._ask("POST", "uri?t=mkdir", b"").decode().strip()
        data = self._random.randbytes(3000)
        name = f"file{len(self._files)}"
        self._ask("PUT", f"uri/{self._directory}/{name}", data)
        self._files[f"{self._directory}/{name}"] = data

    def check(self) -> None:
        """All that was ever stored comes back, and verifies: no share is missing."""
        for cap, data in self._files.items():
            assert self._ask("GET", f"uri/{cap}") == data, f"{cap} holds something else"
        for cap in [*self._files, self._directory]:
            patiently(self.gateway, partial(self._check, cap))

    def _check(self, cap: str) -> None:
        results = self.gateway.check(cap)["results"]
        assert results["count-corrupt-shares"] == 0, f"{cap}: {results}"
        assert results["healthy"], f"{cap}: {results}"

    def _put(self, data: bytes, query: str = "") -> str:
        return self._ask("PUT", f"uri{query}", data).decode().strip()

    def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Ask the gateway something, and once more while it says that it cannot."""
        return patiently(self.gateway, lambda: self.gateway.request(method, path, data))

    def overwrite(self) -> None:
        """Change every mutable file: the write enablers that servers keep must be right."""
        before = self.stored()
        for cap in self._mutable:
            data = self._random.randbytes(self._random.randrange(60_000))
            self._ask("PUT", f"uri/{cap}", data)
            self._files[cap] = data
        after = self.stored()
        for name, record in before.items():
            self._same_leases(name, record, after[name])

    def renew(self) -> None:
        """Renew the leases of all that was stored, as ``tahoe check --add-lease`` does."""
        for cap in [*self._files, self._directory]:
            self._ask("POST", f"uri/{cap}?t=check&add-lease=true&output=JSON", b"")

    def stored(self) -> dict[str, ShareRecord]:
        """Return the record of every share file, by server and path."""
        return {
            f"{server.name}/{path}": record
            for server in self._world.servers
            for path, record in records(server.directory).items()
        }

    def hand_over(self, kind: Kind) -> None:
        """
        Replace the servers, one after the other, by those of the other kind.

        Nothing that a node keeps may be lost, its addresses and its id stay, and shares and leases are the
        same to the byte. While nobody serves them, leases of others are planted, and ours become ten days
        older.
        """
        for server in self._world.servers:
            addresses, server_id = (server.nurl, server.furl), server.server_id
            if server.kind == "tahoe":
                server.refused_beside()
            server.stop()
            shares = server.directory / "storage/shares"
            for path in shares.glob("[a-z2-7][a-z2-7]/*/*"):
                if not read_record(path).strangers:
                    plant(path)
                age(path, OLDER_S)
            before, kept = records(server.directory), files_of(server.directory)
            seqnum = server.seqnum
            server.start(kind)
            if kind == "pipegrid":
                assert server.addresses() == addresses, server.addresses()
            self._world.until_found(self.gateway)
            assert (server.nurl, server.furl) == addresses
            assert server.server_id == server_id
            assert server.seqnum > seqnum
            assert records(server.directory) == before
            after = files_of(server.directory)
            lost = {name for name, data in kept.items() if after.get(name) != data} - PASSING
            if kind == "tahoe":
                lost -= MADE_BY_TAHOE
            assert not lost, f"{lost} of {server.name} changed"

    def check_renewal(self) -> None:
        """Renewing moves the expiry of every lease, adds none, and leaves all else as it was."""
        before = self.stored()

        def renewed() -> bool:  # the gateway does not wait for what servers say to it
            self.renew()
            return all(
                record.expiries[secret] - expires > OLDER_S / 2
                for name, record in self.stored().items()
                for secret, expires in before[name].expiries.items()
                if not secret.startswith(STRANGER)
            )

        until(renewed, "the renewal of all leases", self.gateway)
        after = self.stored()
        assert after.keys() == before.keys()
        for name, record in after.items():
            old = before[name]
            assert record.fixed == old.fixed, f"{name} changed"
            self._same_leases(name, old, record)

    def _same_leases(self, name: str, old: ShareRecord, new: ShareRecord) -> None:
        assert old.expiries.keys() == new.expiries.keys(), f"{name} has other leases"
        assert len(new.strangers) in (0, STRANGERS), f"{name} has {len(new.strangers)}"
        assert old.strangers == new.strangers, f"{name}: leases of others changed"

    def run(self, there: Kind, back: Kind) -> None:
        """Hand all servers over and back; files are stored, changed and read under either."""
        self.store()
        self.check()
        for kind in (there, back):
            self.hand_over(kind)
            self.check_renewal()
            self.check()
            self.overwrite()
            self.store()
            self.check()


def files_of(node: Path) -> dict[str, bytes]:
    """Return what else a node keeps: keys, settings, secrets, whatever is not to change."""
    found: dict[str, bytes] = {}
    for path in node.rglob("*"):
        name = str(path.relative_to(node))
        is_share = name.startswith(("storage/", "logs/"))
        if not is_share:
            # A node that runs renames files, and removes some, while this looks.
            with suppress(FileNotFoundError, IsADirectoryError):
                found[name] = path.read_bytes()
    return found


def make_world(root: Path, kind: Kind, servers: int, needed: int) -> World:
    """Return a grid of servers of one kind."""
    return World(root, [kind] * servers, (needed, servers, servers))
