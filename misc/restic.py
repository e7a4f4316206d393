"""
restic with a gateway and ten servers, each a process of its own: what people do with it, at full size.

Each step fails if its result is wrong; the seconds that it took are printed. ``mount`` needs ``/dev/fuse``
and fusermount, and is left out without them, which is said.

    python -m misc.restic [--files N] [--bytes N] [--seed N]

The status is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from misc.command import compile_package
from misc.ending import end_on_sigterm
from misc.speedtest.processes import Servers
from misc.speedtest.restic import Failed, Place, check_same, gateway_at, make_tree
from pipegrid.speedtest.child_processes import make_client

START_S = 60.0
NAME = "home"
DEAD = 7


class Home:
    """
    A tree of files, and a repository of it on a grid.

    Args:
        scratch: a directory for all of it.
        servers: the grid's.
    """

    def __init__(self, scratch: Path, servers: Servers, options: argparse.Namespace) -> None:
        self.tree = scratch / "tree"
        self._scratch = scratch
        self._servers = servers
        self._options = options
        self._rng = random.Random(options.seed)
        self._restored = 0
        make_tree(self.tree, options.files, options.bytes, self._rng)

    def place(self, url: str, name: str = "restic") -> Place:
        """Return the repositories of a gateway; each name has a cache of its own."""
        return Place(name, f"{url}restic/", self._scratch / f"cache-{name}")

    def back_up(self, place: Place) -> None:
        """The first backup, the same again, and one after changes; all bytes are read again."""
        place.run(NAME, "init")
        place.run(NAME, "backup", str(self.tree))
        place.run(NAME, "backup", str(self.tree))
        for number in range(10):
            (self.tree / f"new{number}").write_bytes(self._rng.randbytes(10_000))
        place.run(NAME, "backup", str(self.tree))
        place.run(NAME, "check", "--read-data")

    def prune(self, place: Place) -> None:
        """Old snapshots are removed, with what they alone need."""
        for file in sorted(self.tree.rglob("f*"))[:: self._options.files // 100 or 1]:
            if file.is_file():
                file.write_bytes(self._rng.randbytes(5_000))
        place.run(NAME, "backup", str(self.tree))
        place.run(NAME, "forget", "--keep-last", "1", "--prune")
        place.run(NAME, "check", "--read-data")
        self.expect_snapshots(place, 1)

    def restore(self, place: Place) -> None:
        """The last snapshot has each file as it is."""
        self._restored += 1
        target = self._scratch / f"restored{self._restored}"
        place.run(NAME, "restore", "latest", "--path", str(self.tree), "--target", str(target))
        check_same(self.tree, target / self.tree.relative_to("/"))
        shutil.rmtree(target)

    def mount(self, place: Place) -> None:
        """A mounted repository shows each file as it is."""
        there = self._scratch / "mnt"
        there.mkdir(exist_ok=True)
        with subprocess.Popen(
            ["restic", "-q", "mount", str(there)],
            env=place.environment(NAME),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as mounting:
            try:
                found = there / "snapshots" / "latest" / self.tree.relative_to("/")
                until_s = time.monotonic() + START_S
                while not found.exists():
                    if time.monotonic() > until_s or mounting.poll() is not None:
                        raise Failed("the repository was not mounted")
                    time.sleep(0.1)
                check_same(self.tree, found)
            finally:
                subprocess.run(["fusermount", "-u", "-z", str(there)], check=False)
                mounting.send_signal(signal.SIGINT)

    def expect_snapshots(self, place: Place, count: int) -> None:
        """
        Raises:
            Failed: there are more or fewer snapshots.
        """
        found = len(place.output(NAME, "list", "snapshots", "--no-lock").split())
        if found != count:
            raise Failed(f"there are {found} snapshots instead of {count}")

    def two_writers(self, place: Place, other: Place) -> None:
        """Two machines back up at a time, each through a gateway of its own: both backups are whole."""
        second = self._scratch / "second"
        make_tree(second, self._options.files // 4, self._options.bytes // 4, self._rng)
        with ThreadPoolExecutor(2) as pool:
            running = [
                pool.submit(place.run, NAME, "backup", str(self.tree)),
                pool.submit(other.run, NAME, "backup", str(second)),
            ]
            for backup in running:
                backup.result()
        for gateway in (place, other):
            self.expect_snapshots(gateway, 3)
            gateway.run(NAME, "check", "--read-data")

    def killed(self, place: Place, gateway: int) -> None:
        """What a gateway has acknowledged is there after it was killed in the middle of a backup."""
        third = self._scratch / "third"
        make_tree(third, self._options.files // 4, self._options.bytes, self._rng)
        with subprocess.Popen(
            ["restic", "-q", "backup", str(third)],
            env=place.environment(NAME),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as backup:
            time.sleep(4)
            os.kill(gateway, signal.SIGKILL)
            backup.kill()

    def resume(self, place: Place) -> None:
        """After that the repository is whole, and the backup is made."""
        place.run(NAME, "unlock", "--remove-all")
        place.run(NAME, "check", "--read-data")
        place.run(NAME, "backup", str(self._scratch / "third"))
        place.run(NAME, "check", "--read-data")
        self.restore(place)

    def kill_servers(self) -> None:
        """Seven of ten are gone for good."""
        for process in self._servers.processes[:DEAD]:
            process.kill()


def second_client(servers: Servers, directory: Path) -> Path:
    """Return another client's directory, with the same alias."""
    make_client(directory, servers.addresses, servers.encoding.params, servers.encoding.happy)
    shutil.copy(servers.client / "private" / "aliases", directory / "private" / "aliases")
    return directory


def step(name: str, work: Callable[..., object], *arguments: object) -> bool:
    """Run a step; returns whether its result was right."""
    began_s = time.monotonic()
    try:
        work(*arguments)
    except Failed as error:
        print(f"{name}: WRONG: {error}", flush=True)
        return False
    print(f"{name}: right, {time.monotonic() - began_s:.1f} s", flush=True)
    return True


def run(scratch: Path, options: argparse.Namespace) -> bool:
    """Run all steps, each of which needs those before it; returns whether all were right."""
    with ExitStack() as stack:
        servers = stack.enter_context(Servers(10))
        home = Home(scratch, servers, options)
        with ExitStack() as first:
            gateway = first.enter_context(gateway_at(servers.client))
            place = home.place(gateway.url)
            good = step("init, backup, repeated, check", home.back_up, place)
            good = good and step("forget, prune, check", home.prune, place)
            good = good and step("restore", home.restore, place)
            if os.access("/dev/fuse", os.W_OK) and shutil.which("fusermount"):
                good = good and step("mount", home.mount, place)
            else:
                print("without /dev/fuse or fusermount nothing is mounted")
            if good:
                client = second_client(servers, scratch / "client")
                other = home.place(first.enter_context(gateway_at(client)).url, "other")
                good = step("two writers at a time", home.two_writers, place, other)
            good = good and step("gateway killed", home.killed, place, gateway.pid)
        gateway = stack.enter_context(gateway_at(servers.client))
        place = home.place(gateway.url)
        good = good and step("check, backup, restore after that", home.resume, place)
        home.kill_servers()
        return good and step(f"restore with {DEAD} of 10 servers dead", home.restore, place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--files", type=int, default=2000, help="[2000]")
    parser.add_argument("--bytes", type=int, default=50_000_000, help="[50000000]")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args(arguments)
    end_on_sigterm()
    compile_package()
    print(f"seed {options.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(Path(scratch), options) else 1


if __name__ == "__main__":
    sys.exit(main())
