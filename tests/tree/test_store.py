"""What a tree asks of a grid, with a grid of no servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UnhappyError
from pipegrid.transfer.results import CheckResult
from pipegrid.transfer.upkeep import UpkeepRequest
from pipegrid.tree.upload_store import GridFiles

CAPS = [ChkCap(bytes([n]) * 16, bytes(32), 3, 10, 100) for n in range(3)]


class _Upkeep:
    """Keeps what it is asked to look after."""

    def __init__(self) -> None:
        self.begun: dict[ChkCap, Callable[[Any], None]] = {}
        self.waiting: Deferred[None] = Deferred()
        self.closed = False

    def begin(self, cap: ChkCap, told: Callable[[Any], None]) -> None:
        self.begun[cap] = told

    async def finished(self) -> None:
        await self.waiting

    def close(self) -> Deferred[None]:
        self.closed = True
        return succeed(None)


@attrs.frozen
class _Config:
    params: Params = attrs.field(factory=Params)
    happy: int = 7


class _Grid:
    """Opens one upkeep, when it is let."""

    config = _Config()

    def __init__(self) -> None:
        self.opening: list[tuple[UpkeepRequest, Deferred[Any]]] = []

    def upkeep(self, todo: UpkeepRequest) -> Deferred[Any]:
        self.opening.append((todo, Deferred()))
        return self.opening[-1][1]


def found(cap: ChkCap, happiness: int) -> CheckResult:
    """Return how an object was found."""
    return CheckResult(cap, True, True, {}, [], happiness, 3, 10, [])


class CheckTests(SynchronousTestCase):
    """``GridFiles.check``."""

    def setUp(self) -> None:
        self.grid = _Grid()
        self.store = GridFiles(self.grid)  # type: ignore[arg-type]
        self.upkeep = _Upkeep()

    def open(self) -> None:
        """Let it be opened."""
        self.grid.opening[-1][1].callback(self.upkeep)

    def test_many_are_looked_after_together(self) -> None:
        """One upkeep does all, those that are asked for while it is being opened, too."""
        answers = [self.store.check(cap) for cap in CAPS[:2]]
        self.open()
        answers.append(self.store.check(CAPS[2]))
        self.assertEqual([todo for todo, _ in self.grid.opening], [UpkeepRequest(add_lease=True)])
        self.assertEqual(list(self.upkeep.begun), CAPS)
        for cap, happiness in zip(CAPS, (10, 7, 6), strict=True):
            self.upkeep.begun[cap](found(cap, happiness))
        self.assertEqual(
            [self.successResultOf(each).whole for each in answers], [True, True, False]
        )
        self.store.close()
        self.assertTrue(self.upkeep.closed)

    def test_leases(self) -> None:
        """Count as renewed if as many servers as a put wants gave them, or if there are none to give."""
        answers = [self.store.check(cap) for cap in CAPS]
        self.open()
        for cap, renewed in zip(CAPS, (0, 6, 7), strict=True):
            problems = ["the server has no memory"] if renewed else []
            names = [f"server {n}" for n in range(renewed)]
            result = attrs.evolve(found(cap, 10), renewed=names, lease_problems=problems)
            self.upkeep.begun[cap](result)
        healths = [self.successResultOf(each) for each in answers]
        self.assertEqual([each.leased for each in healths], [True, False, True])
        self.assertTrue(all(each.whole for each in healths))

    def test_no_servers(self) -> None:
        """All that wait are told, and the next one tries again."""
        answers = [self.store.check(cap) for cap in CAPS]
        self.grid.opening[-1][1].errback(UnhappyError("no servers", 0, 1))
        for answer in answers:
            self.failureResultOf(answer, UnhappyError)
        self.store.check(CAPS[0])
        self.assertEqual(len(self.grid.opening), 2)

    def test_a_mistake_of_ours_is_not_waited_for(self) -> None:
        """Whoever waits hears of it."""
        answer = self.store.check(CAPS[0])
        self.open()
        self.upkeep.waiting.errback(ZeroDivisionError())
        self.failureResultOf(answer, ZeroDivisionError)

    def test_closed_while_it_is_opened(self) -> None:
        """Opening is given up."""
        answer = self.store.check(CAPS[0])
        self.store.close()
        self.assertTrue(self.grid.opening[0][1].called)
        self.assertNoResult(answer)
