"""
What does ``kill -9`` cost in the middle of ``put -r``, ``backup`` and ``get -r``, and does anything lie then?

The real commands work on a directory of some hundred files, on servers behind relays that count every byte,
with ``--max-memory 8MiB --jobs 32``, so that all that may be under way is much less than the tree. They are
killed when a random number of them have passed. What must hold after every kill:

* the same command, run again, completes; what it stored is whole (``check -r`` finds every share), and comes
  back as it was: names, bytes, modes, times;
* what the database of backups says to be stored is stored, and so is every run that is listed;
* a file that is seen under its name in the target of ``get -r`` is whole, with its mode and time; after the
  rerun nothing hidden is left;
* both runs together pass no more bytes than one that is not killed, and a window.

    python -m misc.soak.kill_tree [--kind put|backup|get] [--kills N] [--seed S]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from misc import ending
from misc.soak.kill_put import Violation
from misc.soak.tree_world import Ended, TreeWorld, described, make_tree
from pipegrid.core.encoding_parameters import Params
from pipegrid.disk.atomic_write import SUFFIX

KINDS = ("put", "backup", "get")
SIZES = (30, 300, 1000, 3000)
MIDDLE = (60_000, 100_000)
"""Of one file in ten."""
LARGE = (3_000_000,)
PARAMS = Params(1, 1)
SERVERS = 2
FILES = 400
BOUNDS = ("--max-memory", "8MiB", "--jobs", "32")
HELD_BYTES = 2 << 20
"""A quarter of the memory: what of plaintext is under way."""
FORGOTTEN_BYTES = 1 << 20
"""What is stored between two moments at which that is written down: 200 rows, or a second's."""
LARGE_BYTES = (1 << 20) + (1 << 19)
"""Of a large file: the window before the first answer, and what was torn; or a segment and a half."""
OVERHEAD = 0.02
HANDSHAKES_BYTES = 100_000
_TRIES = 20
_SEEN_EVERY = 10
"""So often is what was stored fetched, too; it is checked each time."""


class Kills:
    """
    One kind of command, killed again and again.

    Attributes:
        twice: bytes that were passed twice, of each round.
        said: told of each round's figures.
    """

    def __init__(self, kind: str, world: TreeWorld, source: Path, rng: random.Random) -> None:
        self.kind = kind
        self.said: Callable[[str], None] = lambda figures: None
        self.twice: list[int] = []
        self._world = world
        self._source = source
        self._rng = rng
        self._rounds = 0
        self._uncut = 0
        self._cap = ""
        self._expected = described(source)
        self.window = HELD_BYTES + LARGE_BYTES + (0 if kind == "get" else FORGOTTEN_BYTES)

    async def _fresh(self) -> None:
        """Take a client whose files nobody has stored yet."""
        self._rounds += 1
        self._world.client = self._world.scratch / f"{self.kind}{self._rounds}"
        self._world.make_client(self._world.client)

    def _target(self) -> Path:
        return self._world.scratch / f"target{self._rounds}"

    def _arguments(self) -> list[str]:
        if self.kind == "put":
            return ["put", *BOUNDS, "-r", str(self._source)]
        if self.kind == "backup":
            return ["backup", *BOUNDS, str(self._source)]
        return ["get", *BOUNDS, "-r", self._cap, "-o", str(self._target())]

    def _passed(self, ended: Ended) -> int:
        return ended.down if self.kind == "get" else ended.up

    async def measure(self) -> int:
        """Run it uncut; returns the bytes that pass."""
        await self._fresh()
        if self.kind == "get":
            self._cap = _good(await self._world.run("put", "-r", str(self._source))).out.strip()
            self._rounds += 1
        ended = _good(await self._world.run(*self._arguments()))
        self._uncut = self._passed(ended)
        self._both = ended.up + ended.down
        return self._uncut

    async def round(self) -> None:
        """
        Kill it once, and run it again.

        Raises:
            Violation: a promise was broken.
        """
        kill_at, killed = await self._killed()
        await self._look()
        rerun = _good(await self._world.run(*self._arguments()))
        passed = self._passed(killed) + self._passed(rerun)
        twice = passed - int(self._uncut * (1 + OVERHEAD)) - HANDSHAKES_BYTES
        self.twice.append(max(0, twice))
        self.said(
            f"killed at {kill_at}: {self._passed(killed)} and {self._passed(rerun)} bytes, "
            f"{max(0, twice)} twice"
        )
        await self._compare(rerun.out.strip())
        if twice > self.window:
            raise Violation(
                f"killed at {kill_at}: {self._passed(killed)} bytes in {killed.seconds:.1f} s and "
                f"{self._passed(rerun)} in {rerun.seconds:.1f} s passed, where uncut {self._uncut} do: "
                f"{twice} twice, and the window is {self.window}"
            )

    async def _killed(self) -> tuple[int, Ended]:
        """Return after how many bytes it was killed, and how it ended; one that had ended does not count."""
        for _ in range(_TRIES):
            if self.kind == "get":
                self._rounds += 1
            else:
                await self._fresh()
            kill_at = self._rng.randrange(int(self._both * 1.02))
            killed = await self._world.run(*self._arguments(), kill_at=kill_at)
            if killed.status == -signal.SIGKILL:
                return kill_at, killed
            if killed.status:
                raise Violation(f"it ended with {killed.status} before it was killed: {killed.err}")
        raise Violation(f"it ended {_TRIES} times in a row before it was killed")

    async def _look(self) -> None:
        """See that nothing lies."""
        if self.kind == "backup":
            await self._look_at_database()
        elif self.kind == "get" and self._target().exists():
            for name, found in described(self._target()).items():
                wrong = found != self._expected.get(name)
                if found[0] == "file" and not name.endswith(SUFFIX) and wrong:
                    raise Violation(f"{name} is there, and not what it should be")

    async def _look_at_database(self) -> None:
        place = self._world.client / "private" / "backup"
        database = place / "database.sqlite"
        if database.exists():
            with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
                tables = "SELECT name FROM sqlite_master WHERE name = 'objects'"
                has_objects = connection.execute(tables).fetchall()
                rows = (
                    connection.execute("SELECT cap FROM objects").fetchall() if has_objects else []
                )
            connection.close()
            caps = self._world.scratch / "caps"
            caps.write_text("".join(f"{cap}\n" for (cap,) in rows))
            if rows:
                _good(await self._world.run("-q", "check", "--from", str(caps)))
        if (place / "catalogue.cap").exists():
            cap = (place / "catalogue.cap").read_text().strip()
            _good(await self._world.run("-q", "check", "-r", cap))

    async def _compare(self, cap: str) -> None:
        """See that all is there after the rerun."""
        target = self._target()
        if self.kind == "get":
            if described(target) != self._expected:
                raise Violation("after the rerun the target is not what was stored")
            return
        _good(await self._world.run("-q", "check", "-r", cap))
        if self._rounds % _SEEN_EVERY == 1:
            fetch = ["get", "-r"] if self.kind == "put" else ["restore"]
            _good(await self._world.run(*fetch, cap, "-o", str(target)))
            if described(target) != self._expected:
                raise Violation("what was stored is not what comes back")


def _good(ended: Ended) -> Ended:
    if ended.status:
        raise Violation(f"a command gave {ended.status}: {ended.err}")
    return ended


async def run(
    reactor: Any,
    kinds: Sequence[str],
    kills: int,
    files: int,
    seed: int,
    out: TextIO,
    verbose: bool = False,
) -> int:
    """Kill each kind so many times; returns 0 if no promise was broken."""
    rng = random.Random(seed)
    print(f"kill_tree: {kills} kills each, {files} files, seed {seed}", file=out)
    broken = 0
    with tempfile.TemporaryDirectory(prefix="pipegrid-kill-tree-") as directory:
        scratch = Path(directory)
        source = scratch / "source"
        sizes = [rng.choice(SIZES if number % 10 else MIDDLE) for number in range(files)]
        make_tree(source, rng, [*sizes, *LARGE])
        world = TreeWorld(reactor, scratch, SERVERS, PARAMS)
        try:
            await world.start()
            for kind in kinds:
                what = Kills(kind, world, source, rng)
                if verbose:
                    what.said = lambda figures: print(f"    {figures}", file=out, flush=True)
                uncut = await what.measure()
                for _ in range(kills):
                    broken += await _judged(what, out)
                twice = sorted(what.twice) or [0]
                print(
                    f"  {kind}: uncut {uncut} bytes; killed {kills} times, at most {twice[-1]} bytes twice, "
                    f"median {twice[len(twice) // 2]} (allowed {what.window})",
                    file=out,
                    flush=True,
                )
        finally:
            await world.stop()
    print(f"{broken:6d} promises broken", file=out)
    return 1 if broken else 0


async def _judged(what: Kills, out: TextIO) -> int:
    """Play a round; returns how many promises were broken."""
    try:
        await what.round()
    except Violation as violation:
        print(f"  BROKEN {what.kind}: {violation}", file=out, flush=True)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--kind", action="append", choices=KINDS, help="[all]")
    parser.add_argument("--kills", type=int, default=10, help="of each kind [10]")
    parser.add_argument("--files", type=int, default=FILES, help=f"small ones [{FILES}]")
    parser.add_argument("--seed", type=int, default=None, help="[a new one]")
    parser.add_argument("--verbose", action="store_true", help="tell of each round")
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    kinds = options.kind or KINDS
    numbers = (options.kills, options.files, seed)
    return ending.run(lambda reactor: run(reactor, kinds, *numbers, out, options.verbose))


if __name__ == "__main__":
    sys.exit(main())
