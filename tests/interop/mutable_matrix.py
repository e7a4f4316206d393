"""
Mutable files and directories between PipeGrid and Tahoe-LAFS's gateway, on ten servers of either kind, and on
five of each: what either makes the other reads, overwrites, changes in part, links, checks and repairs.

``make interop`` runs it. A *cell* is one kind of servers, encoding, protocol, format and size, as in ``mixed,
7-of-10, foolscap, mdmf, 131073 bytes``, and says when it is right. What is wrong is told at once, and the
others go on; the test fails in the end.

Of 330 cells 110 are run. What a client writes follows from encoding, format and size: each of these 42 comes
over both protocols. Servers keep bytes, and know of a message only its size: each kind of them comes with
every size over both protocols, and with every encoding and format. Which of the three kinds it is changes
from cell to cell; so do who makes a large file, and whether small ones grow first or shrink. Only a fault
that needs a kind of servers together with an encoding and a size could hide. In ``$CELLS`` may be words that
all have to be in the name of a cell, and ``all`` for those that are left out otherwise:

    CELLS="all 7-of-10 foolscap" python -m twisted.trial tests.interop.mutable_matrix.PipegridServersTests

What takes long is starting, so the servers of a test are there for all its cells, and a gateway for all of
one encoding and protocol; cells of both protocols run side by side. Small files are made by both, and
written over by both, in both orders; a large one is made by one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Sequence
from operator import methodcaller
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from pipegrid.grid import Grid
from tests.interop import processes
from tests.interop.gateway_world import Kind, Protocol, World
from tests.interop.matrix import make_stranger
from tests.interop.mutable_turns import Both, together

SIZES = (0, 1, 1000, 131_072, 131_073, 1_000_000)
LARGE = 10_000_000
FORMATS = ("sdmf", "mdmf")
ENCODINGS = ((7, 10, 10), (1, 1, 1), (3, 10, 10))
PROTOCOLS: tuple[Protocol, ...] = ("gbs", "foolscap")
CELL_S = 900.0
"""Longer than any cell, on a machine that has ten times too much to do."""

CELLS = os.environ.get("CELLS", "").replace(",", "").split()

KINDS: dict[str, Sequence[Kind]] = {
    "tahoe": ("tahoe",) * 10,
    "pipegrid": ("pipegrid",) * 10,
    "mixed": ("tahoe", "pipegrid") * 5,
    "few": ("tahoe", "pipegrid", "tahoe"),
}


@attrs.frozen
class Cell:
    """
    A part of the matrix, and what does it.

    Attributes:
        usual: whether it is run if nobody says what is.
    """

    name: str
    usual: bool
    play: Callable[[Both], Coroutine[Any, Any, None]]

    @property
    def chosen(self) -> bool:
        """Whether it is to be run."""
        words = {*self.name.replace(",", "").split(), "all"}
        return (self.usual or "all" in CELLS) and words.issuperset(CELLS)


def cells_of(
    about: str,
    repairable: bool,
    order: tuple[int, int, int],
    sizes: Sequence[int],
    large: int,
    thinned: bool,
) -> list[Cell]:
    """
    Return what is done with one encoding over one protocol.

    Args:
        about: what their names begin with.
        repairable: whether shares can be spared.
        order: the numbers of kind, encoding and protocol, by which things alternate.
        thinned: leave to each of three kinds a third.
    """
    found: list[Cell] = []
    kind, encoding, protocol = order

    def add(what: str, number: int, method: str, *arguments: Any, **options: Any) -> None:
        usual = not thinned or (kind + encoding + number) % len(ENCODINGS) == 0
        found.append(Cell(f"{about}, {what}", usual, methodcaller(method, *arguments, **options)))

    for number, format in enumerate(FORMATS):
        first = (sum(order) + number) % 2 == 0
        for turn, size in enumerate(sizes, number):
            growing = first == (turn % 2 == 0)
            add(f"{format}, {size} bytes", turn, "take_turns", format, size, growing=growing)
        last = number + len(sizes)
        add(f"{format}, {large} bytes", last, "take_long_turns", format, large, begins=first)
        add(f"{format}, directories", number + protocol, "link", format)
        if repairable:
            add(f"{format}, repair", number + protocol + 1, "repair", format)
    add("mdmf, ranges", protocol + 2, "change_ranges")
    return found


class MatrixTestCase(TestCase):
    """
    Servers of one kind or of both; for each encoding and protocol a gateway, and PipeGrid with other secrets.

    The same contents for both, whoever made, overwrote, updated, linked or repaired it last.
    """

    timeout = 4 * 3600
    kind = "tahoe"
    sizes: tuple[int, ...] = SIZES
    large = LARGE
    encodings: Sequence[tuple[int, int, int]] = ENCODINGS
    thinned = True

    @property
    def kinds(self) -> Sequence[Kind]:
        """Whose servers there are."""
        return KINDS[self.kind]

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        cache = mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(self.root / "cache")})
        cache.start()
        self.addCleanup(cache.stop)
        self.patch(processes, "PATIENCE_S", CELL_S)
        self.world = World(self.root, self.kinds, (1, 1, 1))
        self.addCleanup(self.world.stop)
        self.failed: list[str] = []

    async def check_all(self) -> None:
        """Play every cell that is chosen; what fails is told in the end."""
        for shares in self.encodings:
            await together(*(self._over(protocol, shares) for protocol in PROTOCOLS))
        self.assertEqual(self.failed, [], f"{len(self.failed)} cells")

    async def _over(self, protocol: Protocol, shares: tuple[int, int, int]) -> None:
        about = f"{self.kind}, {shares[0]}-of-{shares[2]}, {protocol}"
        order = (
            list(KINDS).index(self.kind),
            self.encodings.index(shares),
            PROTOCOLS.index(protocol),
        )
        repairable = shares[0] < shares[2]
        cells = cells_of(about, repairable, order, self.sizes, self.large, self.thinned)
        if chosen := [cell for cell in cells if cell.chosen]:
            try:
                await self._with_both(protocol, shares, about, chosen)
            except Exception as error:
                self._tell(about, error, 0.0)

    async def _with_both(
        self, protocol: Protocol, shares: tuple[int, int, int], about: str, cells: Sequence[Cell]
    ) -> None:
        """Start a gateway, open a grid that encodes like it, and play cells with both."""
        gateway = await deferToThread(self.world.start_gateway, protocol, shares)
        await deferToThread(self.world.until_found, gateway)
        gateway.time_limit_s = CELL_S
        client = self.root / f"stranger-{gateway.directory.name}"
        make_stranger(client, self.world.introducer_furl, shares, protocol == "foolscap")
        grid = await Grid.open(reactor, client, wait_for=len(self.kinds))
        try:
            spoken = {server.protocol for server in await grid.status()}
            self.assertEqual(spoken, {"foolscap" if protocol == "foolscap" else "https"})
            both = Both(self, self.world, grid, gateway, shares, Random(about))
            for cell in cells:
                await self._play(cell, both)
        finally:
            await grid.close()
            await deferToThread(gateway.stop)

    async def _play(self, cell: Cell, both: Both) -> None:
        began_s = time.monotonic()
        wrong: Exception | None = None
        try:
            await Deferred.fromCoroutine(cell.play(both)).addTimeout(CELL_S, reactor)
        except Exception as error:  # the others go on
            wrong = error
        self._tell(cell.name, wrong, time.monotonic() - began_s)

    def _tell(self, name: str, wrong: Exception | None, took_s: float) -> None:
        said = "right" if wrong is None else f"WRONG: {type(wrong).__name__}: {wrong}"
        if wrong is not None:
            self.failed.append(f"{name}: {said}")
        print(f"\n  {name}: {said} ({took_s:.1f} s) ", end="", flush=True)


class TahoeServersTests(MatrixTestCase):
    """Ten of Tahoe-LAFS's."""

    kind = "tahoe"

    def test_all(self) -> Deferred[None]:
        """All encodings, protocols, formats and sizes."""
        return Deferred.fromCoroutine(self.check_all())


class PipegridServersTests(TahoeServersTests):
    """Ten of ours."""

    kind = "pipegrid"


class MixedServersTests(TahoeServersTests):
    """Five of each, in turns."""

    kind = "mixed"
