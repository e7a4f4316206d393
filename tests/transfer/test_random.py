"""
Random grids, files and faults, end to end: a put that succeeds is true, a get is right or says why not.

Every case follows from one number, which a failure names: ``Case(number)`` builds it again.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import NotEnoughSharesError, UnhappyError
from pipegrid.transfer.put import ask_first_policy, write_batches
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import DownloadSettings, UploadSettings
from tests.transfer.test_download import Consumer
from tests.transfer.world import RTT, Line, World, content

CASES = 200
MAX_S = 2000.0


class Case:
    """One grid, one file, and what goes wrong."""

    def __init__(self, number: int) -> None:
        self.random = chance = random.Random(number)
        total_shares = chance.choice([1, 2, 4, 5, 10])
        required = chance.randint(1, total_shares)
        servers = chance.choice([1, 3, 5, 10, 13])
        segment_bytes = chance.choice([700, 5000, 1 << 20])
        self.world = World(
            servers,
            params=Params(required, total_shares, segment_bytes),
            happy=chance.randint(1, min(servers, total_shares)),
            window_bytes=chance.choice([1000, 20_000, 1 << 20]),
            ask_first=random.Random(f"ask {number}").choice(["auto", "always", "never"]),
            bytes_per_s=chance.choice([None, 100_000.0]),
            upload=UploadSettings(silence_s=16.0),
            download=DownloadSettings(silence_s=16.0, memory_bytes=chance.choice([5000, 1 << 20])),
        )
        self.data = content(chance.choice([56, 1000, 4999, 20_000]), number)
        self.file = self.world.encoded(self.data)
        self.index = self.file.cap.storage_index
        if number % 3 == 0:
            self.world.grid._open_putter()._means.history.ended(True)
        for line in self.world.lines:
            if chance.random() < 0.4:
                self.trouble(line)

    def trouble(self, line: Line) -> None:
        """Let something go wrong with a server, now or in the middle."""
        chance = self.random
        what = chance.choice(
            [
                "down",
                "dies",
                "full",
                "silent",
                "deaf",
                "mute",
                "forgets",
                "loses",
                "slow",
                "far",
                "has",
            ]
        )
        operation = chance.choice(["allocate", "write", "list_shares", "*"])
        if what == "down":
            line.down = True
        elif what == "dies":
            self.world.network.callLater(chance.uniform(0, 6) * RTT, setattr, line, "down", True)
        elif what == "full":
            line.storage.capacity_bytes = chance.choice([0, len(self.file.shares[0])])
        elif what == "silent":
            line.silent = {"*"}
        elif what == "deaf":
            line.silent = {operation}
        elif what == "mute":
            line.answers_silent = {operation}
        elif what == "forgets":
            line.forget = chance.choice([1, 2, 1000])
        elif what == "loses":
            line.answers_lost = {operation}
        elif what == "slow":
            line.bytes_per_s = 8000.0  # a share within the silence
        elif what == "far":
            line.rtt_s = chance.choice([5, 50]) * RTT
        else:
            number = chance.randrange(len(self.file.shares))
            line.storage.shares[self.index, number] = self.file.shares[number]

    def damage(self) -> None:
        """Between put and get: servers go and come, shares rot, vanish and lie."""
        chance = self.random
        for line in self.world.lines:
            line.down = line.down and chance.random() < 0.3
            for operations in (line.silent, line.answers_silent, line.answers_lost):
                operations.clear()
            if chance.random() < 0.6:
                continue
            what = chance.choice(["down", "silent", "rot", "cut", "vanish", "swap", "lie", "break"])
            if what == "down":
                line.down = True
            elif what == "silent":
                line.silent = {chance.choice(["*", "read", "stream", "list_shares"])}
            elif what == "lie":
                line.lies = {chance.randrange(256)}
            elif what == "break":
                line.stream_limit = chance.randrange(20_000)
            else:
                self.spoil(line, what)

    def spoil(self, line: Line, what: str) -> None:
        """Do something to each share of a server."""
        chance = self.random
        for number, share in line.shares(self.index).items():
            key = self.index, number
            if what == "vanish":
                del line.storage.shares[key]
            elif what == "cut":
                line.storage.shares[key] = share[: chance.randrange(len(share))]
            elif what == "swap":
                line.storage.shares[key] = chance.choice(self.file.shares)
            else:
                spoilt = bytearray(share)
                spoilt[chance.randrange(len(share))] ^= 1 << chance.randrange(8)
                line.storage.shares[key] = bytes(spoilt)

    def surely_good(self) -> set[int]:
        """Return the shares that are whole on a server that answers everything."""
        return {
            number
            for line in self.world.lines
            if not (line.down or line.silent) and line.stream_limit is None
            for number, share in line.shares(self.index).items()
            if share == self.file.shares[number]
        }


class RandomTests(SynchronousTestCase):
    """Two hundred cases."""

    def setUp(self) -> None:
        self.patch(write_batches, "BATCH_BYTES", 4096)
        self.patch(ask_first_policy, "SMALL_BYTES", 500)

    def test_puts_are_true_and_gets_are_right(self) -> None:
        """Whatever goes wrong, on either way; and nothing is left behind."""
        outcomes = {"put": 0, "unhappy": 0, "got": 0, "lost": 0}
        for number in range(CASES):
            with self.named(number):
                for outcome in self.run_case(Case(number)):
                    outcomes[outcome] += 1
        # The cases are worth something: every outcome is frequent.
        self.assertGreater(min(outcomes.values()), CASES // 20, str(outcomes))

    @contextmanager
    def named(self, number: int) -> Iterator[None]:
        """Say which case it was that failed."""
        try:
            yield
        except BaseException:
            print(f"\ntests.transfer.test_random: Case({number}) failed")
            raise

    def run_case(self, case: Case) -> list[str]:
        outcomes = [self.put(case)]
        case.world.settle()
        if not case.world.stored(case.index):
            return outcomes
        case.damage()
        return [*outcomes, self.get(case)]

    def put(self, case: Case) -> str:
        world = case.world
        try:
            result = world.run(world.grid.put(case.data), MAX_S)
        except UnhappyError as error:
            self.assertLess(error.reached, error.wanted)
            outcome = "unhappy"
        else:
            self.check_result(case, result)
            outcome = "put"
        self.assertEqual(world.clock.getDelayedCalls(), [])
        in_flight = [peer.pipeline.bytes_in_flight for peer in world.grid._peers]
        self.assertEqual(in_flight, [0] * len(in_flight))
        for line in world.lines:
            for number, share in line.shares(case.index).items():
                self.assertEqual(share, case.file.shares[number])
        return outcome

    def check_result(self, case: Case, result: PutResult) -> None:
        self.assertEqual(result.cap, case.file.cap)
        self.assertGreaterEqual(result.happiness, case.world.happy)
        self.assertGreaterEqual(case.world.happiness(case.index), result.happiness)
        stored = case.world.stored(case.index)
        for number, name in result.shares_placed.items():
            self.assertIn(name, stored[number])
        for number, names in result.shares_found.items():
            self.assertLessEqual(set(names), stored[number])

    def get(self, case: Case) -> str:
        world = case.world
        start = case.random.randrange(len(case.data))
        length = case.random.randint(1, len(case.data) - start)
        into = BytesIO()
        needed = case.file.cap.required_shares
        good = len(case.surely_good())
        try:
            got = world.grid.get(case.file.cap, into, start=start, length=length)
            world.run(got, world.clock.seconds() + MAX_S)
        except NotEnoughSharesError as error:
            self.assertLess(good, needed, f"enough were there: {error}")
            self.assertLess(error.found, error.needed)
            outcome = "lost"
        else:
            self.assertEqual(into.getvalue(), case.data[start : start + length])
            outcome = "got"
        self.assertEqual(world.clock.getDelayedCalls(), [])
        return outcome

    def test_cancelling_at_any_moment(self) -> None:
        """In the same grids, at a random step, on either way: nothing is left, and nothing is logged."""
        for number in range(0, CASES, 2):
            with self.named(number):
                self.cancel_case(Case(number))
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def cancel_case(self, case: Case) -> None:
        world = case.world
        for _ in range(2):
            started: Deferred[object] = world.grid.put(case.data)  # type: ignore[assignment]
            for _ in range(case.random.randrange(60)):
                world.step()
            self.end(started, case)
        world.settle()
        case.damage()
        started = world.grid.get(case.file.cap, Consumer())  # type: ignore[assignment]
        for _ in range(case.random.randrange(60)):
            world.step()
        self.end(started, case)
        world.settle()
        self.assertEqual(world.clock.getDelayedCalls(), [])
        in_flight = [peer.pipeline.bytes_in_flight for peer in world.grid._peers]
        self.assertEqual(in_flight, [0] * len(in_flight))

    def end(self, started: Deferred[object], case: Case) -> None:
        results: list[object] = []
        started.addBoth(results.append)
        started.cancel()
        (result,) = results
        if isinstance(result, Failure):
            wrong = result.check(CancelledError, UnhappyError, NotEnoughSharesError)
            self.assertIsNotNone(wrong, str(result))
        self.assertEqual(case.world.clock.getDelayedCalls(), [])
