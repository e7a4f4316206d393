"""
Random histories of two clients with one catalogue: nothing reachable is lost, everything else is freed.

Both clients, their state directories and the servers are real; network and time are simulated. A client is
killed as ``kill -9`` does: what its files hold at that moment is all that is left of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core import base32
from pipegrid.core.caps import Cap, DirectoryCap, LitCap, parse_cap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import PipegridError
from pipegrid.grid.lease_release_lock import StoringLock
from pipegrid.testing.grid import EPOCH_S
from pipegrid.transfer.upkeep import UpkeepRequest
from pipegrid.tree import prune_roots
from pipegrid.tree.aliases import add_alias, read_aliases
from pipegrid.tree.backup.backup_run import BackupOptions, Backups
from pipegrid.tree.backup.catalogue import BackupRun, Machine, shown_time
from pipegrid.tree.backup.forget import ForgetRequest, forget
from pipegrid.tree.backup.prune import Prune, PruneResult
from pipegrid.tree.backup.retention import Retention
from pipegrid.tree.directory import Directory, create_directory
from pipegrid.tree.directory_reading import read_listing
from pipegrid.tree.tree_check import check_tree
from tests.scratch import scratch_directory
from tests.simulation.grid_world import GridWorld

SERVERS = 3
CONTENTS = 14
"""Files have few contents, so that clients, runs and hands often store the same."""

DAY_S = 86400.0


def content(number: int) -> bytes:
    """One of the contents of files; too long for a literal cap."""
    return hashlib.sha256(b"%d" % number).digest() * (2 + number % 3)


class PruneClient:
    """One user on one machine: a directory, a client's directory with its state, and processes."""

    def __init__(self, world: PruneWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.files = world.root / name / "files"
        self.directory = world.root / name / "client"
        self.state = self.directory / "private"
        self.files.mkdir(parents=True)
        self.state.mkdir(parents=True)
        self.machine = Machine(name, name)
        self.grid: Any = None

    def start(self) -> Any:
        """A new process."""
        world = self.world.grid
        client = world.client(
            self.name,
            params=Params(2, SERVERS),
            happy=2,
            lease_secret=self.name.encode().ljust(32, b"."),
        )
        client.grid.config = attrs.evolve(
            client.grid.config, directory=self.directory, caches=(self.state,)
        )
        client.grid._storing = StoringLock((self.state,), client.grid.clock)
        return client.grid

    def now(self) -> float:
        """The time."""
        return EPOCH_S + self.world.grid.clock.seconds()

    def backups(self, grid: Any) -> Backups:
        """What makes runs."""
        return Backups(grid, now=self.now, machine=self.machine)

    # What the client does; each returns a Deferred.

    def backup(self, grid: Any, **options: Any) -> Deferred[Any]:
        """Store the directory."""
        run = self.backups(grid).run(str(self.files), self.name, BackupOptions(**options))
        return Deferred.fromCoroutine(run)

    def forget(self, grid: Any, which: tuple[str, ...], rules: Retention) -> Deferred[Any]:
        """Forget runs."""
        request = ForgetRequest(which, rules, shown_time(self.now()), self.machine)
        return Deferred.fromCoroutine(forget(self.backups(grid), request))

    def prune(self, grid: Any) -> Deferred[PruneResult]:
        """Release what nothing reaches."""
        return Deferred.fromCoroutine(self.pruning(grid).run())

    def pruning(self, grid: Any) -> Prune:
        """What releases it."""
        place = self.backups(grid).place
        return Prune(grid, place, say=lambda sentence: None, now=self.now)

    def put(self, grid: Any, number: int) -> Deferred[Any]:
        """Put a file under the alias."""

        async def work() -> None:
            result = await grid.put(content(number))
            self.world.by_hand.add(result.cap.storage_index)
            await Directory(grid, self.home(), self.now).link(f"f{number}", result.cap)

        return Deferred.fromCoroutine(work())

    def link(self, grid: Any, name: str, cap: Cap) -> Deferred[Any]:
        """Link something under the alias."""
        return Directory(grid, self.home(), self.now).link(name, cap)

    def home(self) -> DirectoryCap:
        """The directory of the alias."""
        cap = parse_cap(read_aliases(self.directory)["home"])
        assert isinstance(cap, DirectoryCap)
        return cap


class PruneWorld:
    """
    One history.

    Args:
        steps: how many things happen.
    """

    def __init__(self, seed: int, steps: int = 14) -> None:
        self.random = Random(seed)
        self.root = scratch_directory()
        self.grid = GridWorld(SERVERS, latency_s=0.01, seed=seed, root=self.root / "grid")
        self.by_hand: set[bytes] = set()
        self.log: list[str] = []
        self.clients = [PruneClient(self, name) for name in ("ann", "bob")]
        self._steps = steps

    def run(self) -> None:
        """Let the history happen, and check everything; raises AssertionError with what had happened."""
        try:
            self.begin()
            for _ in range(self._steps):
                self._step()
            self.check_reachable()
            self.finish()
        except BaseException as error:
            story = "\n  ".join(self.log)
            raise AssertionError(f"{error!r}\n  {story}") from error

    def close(self) -> None:
        """Remove everything."""
        self.grid.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def begin(self) -> None:
        ann, bob = self.clients
        for client in self.clients:
            grid = client.start()
            made = self.grid.run(Deferred.fromCoroutine(_created(grid)))
            self.end(grid)
            add_alias(client.directory, "home", str(made))
        self.change(ann)
        self._do(ann, "backup", ann.backup)
        (bob.state / "backup").mkdir(mode=0o700)
        cap = (ann.state / "backup/catalogue.cap").read_text()
        (bob.state / "backup/catalogue.cap").write_text(cap)
        self.change(bob)
        self._do(bob, "backup", bob.backup)

    def _step(self) -> None:
        random = self.random
        client = random.choice(self.clients)
        self.grid.clock.advance(random.choice((5, 60, 3600, DAY_S, 5 * DAY_S)))
        what = random.choice(
            (
                "backup",
                "backup",
                "forget",
                "forget",
                "prune",
                "prune",
                "put",
                "link",
                "unlink",
                "pin",
                "both",
            )
        )
        if what == "backup":
            self.change(client)
            rules = random.choice((Retention(), Retention(last=2), Retention(daily=2)))
            self._do(client, what, lambda grid: client.backup(grid, retention=rules))
        elif what == "forget":
            self._forget(client)
        elif what == "prune":
            self._do(client, what, client.prune)
        elif what == "put":
            number = random.randrange(CONTENTS)
            self._do(client, f"put {number}", lambda grid: client.put(grid, number), may_die=False)
        elif what == "both":
            self._both(client)
        else:
            self._keep(client, what)

    def change(self, client: PruneClient) -> None:
        """Change the files of a client."""
        for _ in range(self.random.randrange(4)):
            path = client.files / f"d{self.random.randrange(3)}" / f"f{self.random.randrange(3)}"
            if path.exists() and self.random.random() < 0.3:
                path.unlink()
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content(self.random.randrange(CONTENTS)))
                times = self.now_s() - 100 - self.random.randrange(1000)
                os.utime(path, (times, times))

    def now_s(self) -> float:
        """The time."""
        return EPOCH_S + self.grid.clock.seconds()

    def _forget(self, client: PruneClient) -> None:
        runs = self.runs()
        if self.random.random() < 0.5 and len(runs) > 1:
            run = self.random.choice(runs)
            which: tuple[str, ...] = (f"{run.name}@{run.time}",)
            rules = Retention()
        else:
            which, rules = (), Retention(last=self.random.randrange(1, 3))
        self._do(client, f"forget {which}", lambda grid: client.forget(grid, which, rules))

    def _keep(self, client: PruneClient, what: str) -> None:
        """Link, unlink, pin or unpin something."""
        grid = client.start()
        try:
            self._keep_by(client, grid, what)
        finally:
            self.end(grid)

    def _keep_by(self, client: PruneClient, grid: Any, what: str) -> None:
        if what == "unlink":
            home = Directory(grid, client.home(), client.now)
            listed: Deferred[Any] = home.list()
            names = list(self.grid.run(listed))
            if names:
                name = self.random.choice(names)
                self.log.append(f"{client.name}: unlink {name}")
                self.grid.run(home.unlink(name))
            return
        pins = prune_roots.read_pins(client.directory)
        if what == "pin" and pins and self.random.random() < 0.4:
            name = self.random.choice(list(pins))
            self.log.append(f"{client.name}: unpin {name}")
            prune_roots.remove_pin(client.directory, name)
            return
        runs = self.runs()
        run = self.random.choice(runs) if runs else None
        cap = None if run is None else self._something(grid, run.cap)
        if cap is None or run is None:
            return
        if run.name != client.name:
            # What no backup of this client has stored is not freed; its leases end by themselves.
            self._read(grid, cap, self.by_hand)
        name = f"{what}{len(self.log)}"  # another each time
        self.log.append(f"{client.name}: {what} {name} = {cap}")
        # Another client may have stored it, so it needs a lease of this one.
        if what == "pin":
            prune_roots.add_pin(client.directory, name, cap)
        else:
            self.grid.run(client.link(grid, name, cap))
        self.grid.run(check_tree(grid, cap, UpkeepRequest(renew=True)))

    def _something(self, grid: Any, cap: Cap | None) -> Cap | None:
        """A run, or something in it that has shares."""
        while isinstance(cap, DirectoryCap) and self.random.random() < 0.6:
            entries = self.grid.run(Deferred.fromCoroutine(read_listing(grid, cap))).entries
            if not entries:
                break
            cap = self.random.choice(entries).cap
        return None if cap is None or isinstance(cap, LitCap) else cap

    def _both(self, client: PruneClient) -> None:
        """One prunes while another process, of the same or the other client, stores."""
        other = self.random.choice(self.clients)
        self.change(other)
        number = self.random.randrange(CONTENTS)
        same = other is client
        self.log.append(
            f"{client.name}: prune, while {other.name} {'puts' if same else 'backs up'}"
        )
        pruning = client.start()
        first = client.prune(pruning)
        for _ in range(self.random.randrange(200)):
            self.grid.clock.step()
        grid = other.start()
        second = other.put(grid, number) if same else other.backup(grid)
        for running in (first, second):
            try:
                self.grid.run(running)
            except PipegridError as error:  # noqa: PERF203
                self.log.append(f"  {error}")
        self.end(grid)
        self.end(pruning)

    # Processes, and their deaths.

    def _do(
        self,
        client: PruneClient,
        what: str,
        start: Callable[[Any], Deferred[Any]],
        *,
        may_die: bool = True,
    ) -> None:
        first = not self.log
        dies = (may_die and not first and what != "backup") or (may_die and len(self.log) > 4)
        dies = dies and self.random.random() < 0.3
        grid = client.start()
        running = start(grid)
        if dies:
            events = int(10 ** self.random.uniform(0, 3.2))
            for _ in range(events):
                if running.called or not self.grid.clock.step():
                    break
            if not running.called:
                self.log.append(f"{client.name}: {what}, killed")
                self.kill(client, running)
                return
        self.log.append(f"{client.name}: {what}")
        try:
            result = self.grid.run(running)
            if isinstance(result, PruneResult):
                self.log[-1] += f" {result.objects} objects, {result.released}, {result.problems}"
        except PipegridError as error:
            self.log.append(f"  {error}")
        self.end(grid)

    def kill(self, client: PruneClient, running: Deferred[Any]) -> None:
        """Kill a process: its files stay as they are now."""
        saved = client.directory.with_name("killed")
        shutil.copytree(client.directory, saved)
        host = self.grid.network.host(client.name)
        host.crash()
        running.addErrback(lambda _: None)
        running.cancel()
        for each in self.grid.clients:
            if each.name == client.name:
                each.grid._storing.release()
        self.grid.clock.advance(1)
        host.restart()
        shutil.rmtree(client.directory)
        os.rename(saved, client.directory)

    def end(self, grid: Any) -> None:
        self.grid.run(grid.close())

    # What must hold.

    def runs(self) -> tuple[BackupRun, ...]:
        """What the catalogue lists."""
        client = self.clients[0]
        grid = client.start()
        runs = self.grid.run(Deferred.fromCoroutine(client.backups(grid).runs()))
        self.end(grid)
        return runs

    def check_reachable(self) -> set[bytes]:
        """Read everything that is reachable; return its storage indexes."""
        found: set[bytes] = set()
        grid = self.clients[0].start()
        for client in self.clients:
            for root in prune_roots.kept_caps(client.directory):
                self._read(grid, root.cap, found)
            text = (client.state / "backup/catalogue.cap").read_text()
            self._read(grid, parse_cap(text.strip()), found)
            place = client.backups(_Config(client))
            for run in place.place.noted().unlisted:
                self._read(grid, run.cap, found)
        self.end(grid)
        return found

    def _read(self, grid: Any, cap: Cap | None, found: set[bytes]) -> None:
        assert cap is not None
        file: Any = cap.file if isinstance(cap, DirectoryCap) else cap
        if file.storage_index is not None:
            if file.storage_index in found:
                return
            found.add(file.storage_index)
        if isinstance(cap, DirectoryCap):
            listing = self.grid.run(Deferred.fromCoroutine(read_listing(grid, cap)))
            for entry in listing.entries:
                self._read(grid, entry.cap, found)
        else:
            self.grid.run(grid.read(cap))
            health = self.grid.run(grid.check(cap))
            assert health.healthy, f"{cap}: {health}"

    def finish(self) -> None:
        """All prune; then servers have what is reachable, and nothing else."""
        self.grid.clock.advance(60)
        for client in (*self.clients, *self.clients):
            grid = client.start()
            result = self.grid.run(client.prune(grid))
            assert not result.problems, result.problems
            self.end(grid)
        reachable = self.check_reachable()
        left = self.stored() - reachable - self.by_hand
        assert not left, f"{len(left)} objects were not freed: {self._owners(left)}"

    def _owners(self, left: set[bytes]) -> list[str]:
        """Return whose leases keep objects, and what those clients know of them."""
        found = []
        for client in self.clients:
            grid = client.start()
            known = (client.state / "backup/candidates").read_bytes()
            for index in sorted(left):
                secrets = grid._means.secrets.for_file(index)
                server = self.grid.servers[0]
                seed = next(p for p in grid._peers if p.name == server.name).identity.lease_seed
                done = server.store.release_lease(
                    index, secrets.for_server(seed).cancel, server.store.now + 10**8
                )
                noted = (
                    "noted"
                    if index in {known[i : i + 16] for i in range(0, len(known), 16)}
                    else "unknown"
                )
                found.append(f"{index.hex()[:8]} {client.name} {done.leases} {noted}")
            self.end(grid)
        return found

    def stored(self) -> set[bytes]:
        """Return the storage indexes of all shares on all servers."""
        return {
            base32.decode(path.parent.name)
            for server in self.grid.servers
            for path in Path(server.root, "shares").glob("??/*/*")
            if path.parent.parent.name != "incoming"
        }


class _Config:
    """As much of a grid as finds a client's state."""

    def __init__(self, client: PruneClient) -> None:
        self.config = client.start().config


async def _created(grid: Any) -> DirectoryCap:
    return (await create_directory(grid)).cap


def run_history(seed: int, steps: int = 14) -> list[str]:
    """Run one history; return what happened. Raises AssertionError if something was lost or not freed."""
    world = PruneWorld(seed, steps)
    try:
        world.run()
        return world.log
    finally:
        world.close()
