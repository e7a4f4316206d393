"""
Whole trees: PipeGrid's command and Tahoe-LAFS's in turns on the same ten servers, then on servers of ours.

    python -m misc.speedtest.trees [--servers tahoe|ours]... [--only KEY,KEY] [--rounds 3] [--files 1000]
                                   [--peer-files N] [--peer-rounds N] [--again N] [--rtt 100]
                                   [--protocol https|foolscap] [--against https|foolscap] [--tiny]

``$TAHOE`` is the command of Tahoe-LAFS (``make interop`` installs it in ``.venv-tahoe``). Both are commands
as users type them, from start to end: PipeGrid's connects to its servers each time, Tahoe-LAFS's asks a
gateway that is connected. The servers are behind one relay that adds the round trip to both.

Each tree is random and fresh: ``--files`` files of 200 B to 1 MB, 50 kB each on average, ten in a directory.
What was stored is fetched and compared byte for byte, outside the time that counts. Both fetch, check and
repair trees that PipeGrid has stored.

Tahoe-LAFS takes most of an hour for all of it: ``--peer-files 50`` measures it on a tree of fifty files, and
scales; ``--peer-rounds`` says how many rounds it takes part in. A first backup takes most of a round:
``--again 5`` backs up five times more what has not changed, and what has.

Keys: first, same, ten, put, get, check, lease, mend, repair, deep-put, deep-get, list. A JSON line for
each as soon as it is known, and a table at the end; ``NOT MET`` is what it says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from misc.command import compile_package
from misc.ending import end_on_sigterm
from misc.scratch import scratch_directory
from misc.speedtest.peers.nodes import HTTPS, PROTOCOLS
from misc.speedtest.trees import contents, grids
from misc.speedtest.trees.contest import (
    CHECK,
    DEEP_GET,
    DEEP_PUT,
    FIRST,
    GET,
    LEASE,
    LIST,
    MEND,
    PUT,
    REPAIR,
    SAME,
    TASKS,
    TEN,
    Measured,
    Task,
    table,
)
from misc.speedtest.trees.grids import World
from misc.speedtest.trees.sides import Side, Tahoe, Took
from pipegrid.core.caps import LitCap
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.tree.backup.backup_database import RACY_NS

CHANGED = 10
DEPTH = 20
ENTRIES = 10_000
ASKED = ("files", "protocol", "against")


class Bench:
    """One grid, and turns on it."""

    def __init__(self, world: World, options: argparse.Namespace, rng: random.Random) -> None:
        self._world = world
        self._options = options
        self._rng = rng
        self._scratch = Path(tempfile.mkdtemp(dir=options.scratch))
        self._numbers = 0
        self._found: dict[Task, Measured] = {}
        self._constants: dict[Task, float] = {}

    def close(self) -> None:
        """Remove all trees."""
        shutil.rmtree(self._scratch)

    def run(self) -> list[Measured]:
        """Take all turns."""
        options, tahoe = self._options, self._world.tahoe
        if tahoe is not None and options.peer_rounds:
            self._constants = self._without_files(tahoe)
        for number in range(options.rounds):
            self._turn(self._world.pipegrid, options.files)
            if tahoe is not None and number < options.peer_rounds:
                self._turn(tahoe, options.peer_files)
        return list(self._found.values())

    def _wants(self, *tasks: Task) -> bool:
        return any(each.key in self._options.only for each in tasks)

    def _path(self, name: str) -> Path:
        self._numbers += 1
        return self._scratch / f"{name}{self._numbers}"

    def _note(self, side: Side, task: Task, took: Took, beyond: Took | None = None) -> None:
        measured = self._found.get(task)
        if measured is None:
            options = self._options
            measured = self._found[task] = Measured(
                task,
                self._world.name,
                options.rtt / 1000,
                os.cpu_count() or 1,
                constant_s=self._constants.get(task, 0.0),
                scale=options.files / options.peer_files,
            )
        (measured.peer if isinstance(side, Tahoe) else measured.ours).append(took)
        if beyond is not None:
            measured.beyond.append(beyond)
        said = f"{self._world.name}: {side.name} {task.name}: {took.seconds:.2f} s"
        print(
            f"{said} (cpu {took.cpu_s:.2f} + {took.others_cpu_s:.2f})", file=sys.stderr, flush=True
        )

    def _turn(self, side: Side, files: int) -> None:
        if self._wants(FIRST, SAME, TEN):
            self._backup(side, files)
        if self._wants(PUT, GET):
            self._move(side, files)
        if self._wants(CHECK, LEASE, MEND, REPAIR):
            self._maintain(side, files)
        if not isinstance(side, Tahoe):
            if self._wants(DEEP_PUT, DEEP_GET):
                self._deep()
            if self._wants(LIST):
                self._list()

    def _backup(self, side: Side, files: int) -> None:
        tree = self._path("tree")
        contents.make_tree(tree, files, self._rng)
        self._let_settle()
        self._note(side, FIRST, side.backup(tree, tree.name))
        for _ in range(self._options.again):
            if self._wants(SAME):
                self._note(side, SAME, side.backup(tree, tree.name))
            if self._wants(TEN):
                contents.change(tree, CHANGED, self._rng)
                self._let_settle()
                self._note(side, TEN, side.backup(tree, tree.name))
        copy = self._path("copy")
        side.restore(tree.name, copy)
        self._compare(tree, copy)

    @staticmethod
    def _let_settle() -> None:
        """Let what was written come of age, or else the run after the next would read it again."""
        time.sleep(1.1 * RACY_NS / 1e9)

    def _move(self, side: Side, files: int) -> None:
        tree, copy = self._path("tree"), self._path("copy")
        contents.make_tree(tree, files, self._rng)
        cap = ""
        if self._wants(PUT):
            took = side.put(tree)
            self._note(side, PUT, took)
            cap = took.said
        if isinstance(side, Tahoe) and cap:
            self._world.pipegrid.get(cap, copy)
            contents.compare(tree, copy)
            shutil.rmtree(copy)
        if self._wants(GET):
            if isinstance(side, Tahoe) or not cap:
                cap = self._world.pipegrid.put(tree).said
            self._note(side, GET, side.get(cap, copy))
        elif not isinstance(side, Tahoe):
            side.get(cap, copy)
        if copy.exists():
            contents.compare(tree, copy)
        self._clear(tree, copy)

    def _maintain(self, side: Side, files: int) -> None:
        world = self._world
        tree = self._path("tree")
        contents.make_tree(tree, files, self._rng)
        cap = world.pipegrid.put(tree).said
        if self._wants(CHECK):
            self._note(side, CHECK, side.check(cap))
        if self._wants(LEASE):
            self._note(side, LEASE, side.check(cap, add_lease=True))
        if self._wants(MEND):
            world.empty_any(self._rng)
            self._note(side, MEND, side.check(cap, repair=True))
            world.pipegrid.check(cap)  # fails unless all is whole again
        if self._wants(REPAIR):
            world.empty_any(self._rng)
            if isinstance(side, Tahoe):
                self._note(side, REPAIR, side.check(cap, repair=True))
            else:
                self._note(side, REPAIR, world.pipegrid.repair(cap))
            world.pipegrid.check(cap)
        self._clear(tree)

    def _deep(self) -> None:
        tree, copy = self._path("tree"), self._path("copy")
        contents.make_deep(tree, DEPTH, self._rng)
        side = self._world.pipegrid
        put = side.put(tree)
        self._note(side, DEEP_PUT, put)
        self._note(side, DEEP_GET, side.get(put.said, copy))
        self._compare(tree, copy)

    def _list(self) -> None:
        side, packed, copy = self._world.pipegrid, self._path("packed"), self._path("copy")
        literals = [LitCap(self._rng.randbytes(20)) for _ in range(ENTRIES)]
        children = [PackedChild(f"entry{n:05}", cap, {}) for n, cap in enumerate(literals)]
        packed.write_bytes(pack_immutable(children))
        cap = side.put_file(packed)
        took = side.cat(cap, copy)
        listed = side.list(cap.replace("URI:CHK:", "URI:DIR2-CHK:"))
        names = [line.rpartition(" ")[2] for line in listed.said.splitlines()]
        if names != [f"entry{n:05}" for n in range(ENTRIES)]:
            raise RuntimeError(f"listed {len(names)} entries, not the {ENTRIES} that there are")
        self._note(side, LIST, listed, took)

    def _compare(self, tree: Path, copy: Path) -> None:
        contents.compare(tree, copy)
        self._clear(tree, copy)

    def _clear(self, *paths: Path) -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
        self._world.forget()

    def _without_files(self, tahoe: Tahoe) -> dict[Task, float]:
        """Return what tasks take that have nothing to do, where that matters."""
        found: dict[Task, float] = {}
        if self._options.peer_files == self._options.files:
            return found
        tree = self._path("tree")
        tree.mkdir()
        if self._wants(FIRST, SAME, TEN):
            found[FIRST] = tahoe.backup(tree, tree.name).seconds
        if self._wants(PUT):
            found[PUT] = tahoe.put(tree).seconds
        cap = self._world.pipegrid.put(tree).said
        if self._wants(GET):
            found[GET] = tahoe.get(cap, self._path("copy")).seconds
        if self._wants(CHECK, LEASE, MEND, REPAIR):
            seconds = tahoe.check(cap).seconds
            found |= dict.fromkeys((CHECK, LEASE, MEND, REPAIR), seconds)
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    options = _options(arguments)
    end_on_sigterm()
    if not options.tiny:  # Tahoe-LAFS's command is installed, and compiled
        compile_package()
    rng = random.Random(options.seed)
    found: list[Measured] = []
    for kind in options.servers:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            rtt_s = options.rtt / 1000
            place = Path(scratch)
            starting = (
                grids.tahoes(place, rtt_s, options.protocol, options.against)
                if kind == "tahoe"
                else grids.ours(place, rtt_s, options.nice)
            )
            with starting as world:
                bench = Bench(world, options, rng)
                try:
                    for measured in bench.run():
                        asked = {name: getattr(options, name) for name in ASKED}
                        print(json.dumps({**measured.as_json(), **asked}), flush=True)
                        found.append(measured)
                finally:
                    bench.close()
    print(table(found), file=sys.stderr)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--servers", choices=("tahoe", "ours"), action="append", help="[both]")
    keys = ",".join(each.key for each in TASKS)
    parser.add_argument("--only", default=keys, metavar="KEY,KEY", help=f"[{keys}]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--files", type=int, default=1000, help="[1000]")
    parser.add_argument("--peer-files", type=int, metavar="N", help="for Tahoe-LAFS; [as --files]")
    parser.add_argument("--peer-rounds", type=int, metavar="N", help="of Tahoe-LAFS; [as --rounds]")
    parser.add_argument("--again", type=int, default=1, help="'same' and 'ten' after a first; [1]")
    parser.add_argument("--rtt", type=float, default=100.0, metavar="MS", help="[100]")
    parser.add_argument("--protocol", choices=PROTOCOLS, default=HTTPS, help="PipeGrid's; [https]")
    parser.add_argument(
        "--against", choices=PROTOCOLS, default=HTTPS, help="the gateway's; [https]"
    )
    parser.add_argument("--nice", type=int, default=0, help="of servers of ours; [0]")
    parser.add_argument("--scratch", type=scratch_directory, help="where all directories are made")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    options = parser.parse_args(arguments)
    options.servers = options.servers or ["tahoe", "ours"]
    options.only = options.only.split(",")
    unknown = set(options.only) - {each.key for each in TASKS}
    if unknown:
        parser.error(f"there is no {sorted(unknown)[0]!r}; there are {keys}")
    if options.tiny:
        options.rounds, options.files, options.rtt = 1, 12, 5.0
    if options.peer_files is None:
        options.peer_files = options.files
    if options.peer_rounds is None:
        options.peer_rounds = options.rounds
    return options


if __name__ == "__main__":
    main()
