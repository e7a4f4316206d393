"""A real get is killed, interrupted and run again; bytes are counted on the wire."""

from __future__ import annotations

import io
import random
import signal
from pathlib import Path
from typing import Any

from misc.soak import kill_get
from misc.soak.kill_get import Violation, World
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase


class KillGetTests(TestCase):
    """``misc/soak/kill_get.py``; ``make soak`` does it with 300 MB on ten servers."""

    timeout = 110

    def test_cut_and_run_again(self) -> Deferred[None]:
        """kill -9, SIGINT, and a byte damaged: what was missing is fetched, and at most two segments."""

        async def work() -> None:
            out = io.StringIO()
            status = await kill_get.run(reactor, 20_000_000, 4, 5, out)
            self.assertEqual(status, 0, out.getvalue())
            self.assertIn("     0 promises broken", out.getvalue())

        return Deferred.fromCoroutine(work())

    def test_what_is_fetched_again_is_noticed(self) -> Deferred[None]:
        """If what was kept is not used, the test says so."""

        async def work() -> None:
            scratch = Path(self.mktemp())
            scratch.mkdir()
            world = World(reactor, scratch, 3)
            try:
                await world.store(5_000_000, random.Random(1))
                there = world.data[:3_000_000]
                world.part.write_bytes(bytes(len(there)))
                with self.assertRaises(Violation):
                    await world.rerun()
                world.target.unlink()
                self.patch(World, "cut", self.cut_by_hand(there))
                self.patch(kill_get, "SEGMENT_BYTES", -(10**9))
                with self.assertRaises(Violation) as caught:
                    await kill_get.play(world, signal.SIGKILL, False, random.Random(1))
                self.assertIn("were there", str(caught.exception))
            finally:
                await world.stop()

        return Deferred.fromCoroutine(work())

    def cut_by_hand(self, there: bytes) -> Any:
        async def cut(world: World, how: signal.Signals) -> None:
            world.part.write_bytes(there)

        return cut
