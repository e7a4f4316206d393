"""The kill test of trees runs, and would notice what it is there to notice."""

from __future__ import annotations

import io
import random
from pathlib import Path

from misc.soak import kill_tree
from misc.soak.kill_put import Violation
from misc.soak.kill_tree import Kills
from misc.soak.tree_world import TreeWorld, make_tree
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase


class KillTreeTests(TestCase):
    """``misc/soak/kill_tree.py``; ``make soak`` does it with more files and kills."""

    timeout = 110

    def test_a_kill_each(self) -> Deferred[None]:
        """Put, backup, get: killed and run again, and nothing lies."""

        async def work() -> None:
            out = io.StringIO()
            status = await kill_tree.run(reactor, kill_tree.KINDS, 1, 30, 5, out)
            self.assertEqual(status, 0, out.getvalue())
            self.assertIn("     0 promises broken", out.getvalue())

        return Deferred.fromCoroutine(work())

    def test_what_is_passed_twice_is_noticed(self) -> Deferred[None]:
        """So is a file that is not what it should be."""

        async def work() -> None:
            scratch = Path(self.mktemp()).absolute()
            source = scratch / "source"
            make_tree(source, random.Random(1), [1000] * 5)
            world = TreeWorld(reactor, scratch, kill_tree.SERVERS, kill_tree.PARAMS)
            try:
                await world.start()
                get = Kills("get", world, source, random.Random(1))
                await get.measure()
                get.window = -(10**9)
                with self.assertRaises(Violation) as caught:
                    await get.round()
                self.assertIn("twice", str(caught.exception))
                get._rounds += 1
                make_tree(get._target(), random.Random(2), [1000] * 5)
                with self.assertRaises(Violation) as caught:
                    await get._look()
                self.assertIn("not what it should be", str(caught.exception))
            finally:
                await world.stop()

        return Deferred.fromCoroutine(work())
