"""
Puts that were cut off and are run again, on a whole grid in virtual time: bytes on the line, and round trips.

Servers are real ones on real directories; what is counted are all bytes that a client sends, heads included.
"""

from __future__ import annotations

from random import Random

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.storage.uploads import incoming_files
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import UploadSettings
from tests.simulation.grid_world import Client, GridWorld

RTT_S = 0.1
SIZE = 4_000_000
SEGMENT = 96_000
WINDOW = 150_000
MESSAGE = 64 << 10
"""With such a window none is larger than this and a block."""
BLOCK = SEGMENT // 3
WASTE = WINDOW + MESSAGE + 2 * BLOCK
"""What a server may get beside what it lacks: a window, the message that overfills it, a torn block."""
HEADS = 0.02
"""And so much more is heads of requests, in messages of such a size."""


@attrs.frozen
class Cut:
    """
    How a put ends before its time.

    Attributes:
        part: of its share bytes that are acknowledged then.
        crash: the client's process dies; else the put is cancelled.
        restart: numbers of servers whose processes die then, too, and come back.
    """

    part: float
    crash: bool = False
    restart: tuple[int, ...] = ()


class ResumedTestCase(SynchronousTestCase):
    """Ten servers, 100 ms away."""

    def make_world(self, **options: object) -> None:
        self.world = GridWorld(latency_s=RTT_S / 2, **options)  # type: ignore[arg-type]
        self.addCleanup(self.world.close)

    def client(self, name: str) -> Client:
        """Return a patient client with windows that are known, and small."""
        return self.world.client(
            name,
            params=Params(3, 10, SEGMENT),
            window=lambda: WINDOW,
            upload=UploadSettings(grace_s=60),
        )

    def cut(self, data: bytes, cut: Cut) -> int:
        """Put the file until it is cut off; return how many bytes the servers lack then."""
        world = self.world
        client = self.client("first")
        told: list[tuple[int, int]] = []
        started = client.grid.put(data, progress=lambda *now: told.append(now))
        while not told or told[-1][0] < cut.part * told[-1][1]:
            world.clock.advance(0.001)
            self.assertFalse(started.called, "it was not cut off")
        if cut.crash:
            client.host.crash()
        else:
            started.cancel()
            self.failureResultOf(started, CancelledError)
        for number in cut.restart:
            world.servers[number].host.crash()
        world.clock.advance(1)
        for number in cut.restart:
            world.servers[number].host.restart()
        world.clock.advance(1)
        _, total = told[-1]
        return total - self.unfinished_bytes()

    def unfinished_bytes(self) -> int:
        """Return how much of unfinished shares has arrived: what notes say, whether they are open or not."""
        received = 0
        for server in self.world.servers:
            for path in (server.root / "shares/incoming").rglob("*" + incoming_files.SUFFIX):
                ranges = incoming_files.parse_note(path.read_bytes()).ranges
                received += sum(end - begin for begin, end in ranges)
        return received

    def timed_put(self, name: str, data: bytes) -> tuple[PutResult, float, int]:
        """Put a file from a new process; return how long it took, and what was sent."""
        client = self.client(name)
        since = len(self.world.network.log)

        def start() -> Deferred[PutResult]:
            return client.grid.put(data)

        result, took_s = self.world.timed(start)
        sent = sum(
            each.size_bytes
            for each in list(self.world.network.log)[since:]
            if each.to_host.startswith("s")
        )
        return result, took_s, sent

    def check(self, cut: Cut, **options: object) -> tuple[float, int, int]:
        """
        Cut a put off and run it again.

        Returns:
            how long the rerun took, what was missing, and what was sent.
        """
        self.make_world(**options)
        data = Random(16).randbytes(SIZE)
        missing = self.cut(data, cut)
        result, took_s, sent = self.timed_put("again", data)
        self.assertEqual(result.happiness, 10)
        self.assertEqual([server.unfinished() for server in self.world.servers], [[]] * 10)
        found = self.world.run(self.client("reader").grid.read(result.cap))
        self.assertTrue(found == data)
        self.assertEqual(self.world.leaks(), [])
        return took_s, missing, sent


class BytesTests(ResumedTestCase):
    """What is sent is what is missing, and a window for each server."""

    def test_cut_in_the_middle(self) -> None:
        """Cancelled, or killed; and servers that died with it, which keep what they had."""
        whole = 10 * SIZE // 3
        for cut in (
            Cut(0.54),
            Cut(0.54, crash=True),
            Cut(0.54, restart=(3,)),
            Cut(0.54, crash=True, restart=(0, 4, 9)),
            Cut(0.1, crash=True),
            Cut(0.7),
        ):
            _, missing, sent = self.check(cut)
            self.assertLess(missing, whole * (1 - cut.part) + 10 * WASTE, cut)
            self.assertLessEqual(sent, (1 + HEADS) * (missing + 10 * WASTE), cut)

    def test_a_server_that_dies_under_the_rerun(self) -> None:
        """It comes back at once, and gets what it lacks: a window more, which may have died with it."""
        for at_s in (0.15, 0.25, 0.35):
            self.make_world()
            data = Random(16).randbytes(SIZE)
            missing = self.cut(data, Cut(0.3))
            victim = self.world.servers[3].host
            self.world.clock.callLater(at_s, victim.crash)
            self.world.clock.callLater(at_s + RTT_S / 2, victim.restart)
            result, _, sent = self.timed_put("again", data)
            self.assertEqual(result.happiness, 10)
            self.assertLessEqual(sent, (1 + HEADS) * (missing + 12 * WASTE), f"{at_s} s")

    def test_over_one_line(self) -> None:
        """All servers behind one line of 100 Mbit/s."""
        _, missing, sent = self.check(Cut(0.54), shared_bytes_per_s=12_500_000)
        self.assertLessEqual(sent, (1 + HEADS) * (missing + 10 * WASTE))


class RoundTripTests(ResumedTestCase):
    """Nobody is asked anything first."""

    def test_no_round_trip_more(self) -> None:
        """A rerun takes no more round trips than a fresh put of what is missing."""
        for part in (0.1, 0.3, 0.54, 0.7):
            took_s, missing, _ = self.check(Cut(part, crash=True))
            self.make_world()
            fresh = Random(17).randbytes(3 * missing // 10)
            _, fresh_s, _ = self.timed_put("fresh", fresh)
            self.assertLessEqual(round(took_s / RTT_S, 6), round(fresh_s / RTT_S, 6), part)
