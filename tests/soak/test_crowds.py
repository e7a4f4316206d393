"""What the soak of crowds decides for itself."""

from __future__ import annotations

import random

from misc.soak import crowds
from misc.soak.crowds import FULL, Crowd, judge, random_crowd, set_room
from misc.soak.restarts import HAPPY, SERVERS, Violation
from misc.speedtest.peers.nodes import StorageNode
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import GridError
from tests.scratch import scratch_path

ALONE = Crowd(delay_s=0.1, victims={1: "killed"}, down_s=None, fresh=False)
FEW = Crowd(delay_s=0.1, victims={1: "killed", 2: FULL}, down_s=None, fresh=False)


class JudgeTests(SynchronousTestCase):
    """What may become of a crowd."""

    def test_files_that_are_stored(self) -> None:
        """They are counted; others may fail where too few servers are left, with a sentence."""
        sentence = Failure(GridError("only three servers took shares; start the others"))
        self.assertEqual(judge(ALONE, [object(), object()]), 2)
        self.assertEqual(judge(FEW, [object(), sentence]), 1)
        self.assertRaises(Violation, judge, ALONE, [object(), sentence])

    def test_what_is_no_sentence(self) -> None:
        """Nothing fails with an error of somebody else's, or with a heap of lines."""
        for error in (KeyError("x"), GridError(""), GridError("two\nlines")):
            self.assertRaises(Violation, judge, FEW, [Failure(error)])


class CaseTests(SynchronousTestCase):
    """What is played."""

    def test_every_case_comes(self) -> None:
        """A seed says which; in some enough servers are left, in some not."""
        cases = [random_crowd(random.Random(seed)) for seed in range(200)]
        self.assertEqual(cases[7], random_crowd(random.Random(7)))
        self.assertEqual({case.must_succeed for case in cases}, {True, False})
        ends = {how for case in cases for how in case.victims.values()}
        self.assertEqual(ends, set(crowds.ENDS))
        self.assertTrue(
            all(SERVERS - len(case.victims) < HAPPY for case in cases if not case.must_succeed)
        )

    def test_a_server_without_room(self) -> None:
        """Its configuration says so, until it has room again."""
        node = StorageNode(scratch_path(self) / "node")
        before = (node.directory / "tahoe.cfg").read_text()
        set_room(node, crowds._FULL)
        self.assertIn("reserved_space = 1000000000GB\n", (node.directory / "tahoe.cfg").read_text())
        set_room(node, crowds._FREE)
        self.assertEqual((node.directory / "tahoe.cfg").read_text(), before)
