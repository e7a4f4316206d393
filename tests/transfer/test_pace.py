"""How long an upload waits, and for whom: the decisions alone, without clock, server or file."""

from __future__ import annotations

import math

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transfer.put.straggler_policy import TICK_S, StragglerPolicy, is_silent, until_silence
from pipegrid.transfer.settings import UploadSettings

SETTINGS = UploadSettings(grace_s=2.0, grace_share=0.25, silence_s=60.0)


@attrs.define(eq=False)
class Way:
    """What the way of a share looks like at a moment."""

    name: str = ""
    waiting: bool = True
    last_activity: float = 0.0
    has_space: bool = True
    blocked: bool = False
    pace_s: float = 0.1
    stalled_s: float = 0.0
    peer_activity: float = -math.inf


def blocked(
    name: str = "b", *, last_activity: float = 0.0, pace_s: float = 0.1, stalled_s: float = 0.0
) -> Way:
    """Return one without room."""
    return Way(name, True, last_activity, False, True, pace_s, stalled_s)


def anybody(_way: Way) -> bool:
    """Happiness holds without any one share."""
    return True


def nobody(_way: Way) -> bool:
    """Every share is needed."""
    return False


class SilenceTests(SynchronousTestCase):
    """Servers that owe an answer, and acknowledge nothing."""

    def test_the_first_one_counts(self) -> None:
        """Whoever has been silent longest is given up first."""
        ways = [Way(last_activity=10.0), Way(last_activity=4.0), Way(last_activity=7.0)]
        self.assertEqual(until_silence(ways, 20.0, 60.0), 44.0)

    def test_who_owes_nothing_is_not_silent(self) -> None:
        """There is nothing that it could say."""
        way = Way(waiting=False)
        self.assertEqual(until_silence([way], 1000.0, 60.0), 60.0)
        self.assertFalse(is_silent(way, 1000.0, 60.0))

    def test_it_is_over_to_the_second(self) -> None:
        """As long as was said, and no shorter."""
        way = Way(last_activity=5.0)
        self.assertFalse(is_silent(way, 64.99, 60.0))
        self.assertTrue(is_silent(way, 65.0, 60.0))

    def test_who_answers_others_is_not_silent(self) -> None:
        """On a slow line a share waits behind those of other files."""
        way = Way(last_activity=5.0, peer_activity=50.0)
        self.assertFalse(is_silent(way, 109.0, 60.0))
        self.assertEqual(until_silence([way], 100.0, 60.0), 10.0)
        self.assertTrue(is_silent(way, 110.0, 60.0))

    def test_who_answers_everybody_else(self) -> None:
        """Is not waited for without end."""
        way = Way(last_activity=5.0, peer_activity=600.0)
        self.assertFalse(is_silent(way, 604.9, 60.0))
        self.assertEqual(until_silence([way], 600.0, 60.0), 5.0)
        self.assertTrue(is_silent(way, 605.0, 60.0))


class RoomTests(SynchronousTestCase):
    """While segments go by."""

    def setUp(self) -> None:
        self.pace: StragglerPolicy[Way] = StragglerPolicy(SETTINGS, 0.0)

    def test_room_everywhere(self) -> None:
        """There is nothing to wait for."""
        self.assertIsNone(self.pace.window_wait_s(1.0, [Way(), Way()], anybody))

    def test_all_are_blocked(self) -> None:
        """Nobody keeps anybody waiting: only silence ends the wait, and nobody is charged."""
        ways = [blocked(last_activity=1.0), blocked(last_activity=1.0)]
        self.assertEqual(self.pace.window_wait_s(1.0, ways, anybody), 60.0)
        self.assertEqual(self.pace.charge_wait(50.0, ways), [])
        self.assertEqual([way.stalled_s for way in ways], [0.0, 0.0])

    def test_one_keeps_the_others_waiting(self) -> None:
        """It has the grace, in one wait or in many, and is dropped then if it is slow."""
        slow = blocked("slow", pace_s=1.0, last_activity=1.0)
        ways = [slow, Way(last_activity=1.0), Way(last_activity=1.0)]
        self.assertEqual(self.pace.window_wait_s(1.0, ways, anybody), 2.0)
        self.assertEqual(self.pace.charge_wait(2.5, ways), [])
        self.assertEqual(slow.stalled_s, 1.5)
        self.assertEqual(self.pace.window_wait_s(3.0, ways, anybody), 0.5)
        self.assertEqual(self.pace.charge_wait(3.5, ways), [slow])

    def test_a_line_that_all_share(self) -> None:
        """Where answers of all take equally long it is not the server's fault; it starts anew."""
        held_up = blocked(pace_s=1.9, last_activity=1.0)
        ways = [held_up, Way(pace_s=1.0), Way(pace_s=1.0)]
        self.pace.window_wait_s(1.0, ways, anybody)
        self.assertEqual(self.pace.charge_wait(3.0, ways), [])
        self.assertEqual(held_up.stalled_s, 0.0)

    def test_what_cannot_be_spared(self) -> None:
        """A share that happiness needs is waited for until its server is silent."""
        ways = [blocked(last_activity=1.0), Way(last_activity=1.0)]
        self.assertEqual(self.pace.window_wait_s(1.0, ways, nobody), 60.0)

    def test_it_found_room_meanwhile(self) -> None:
        """Only who is blocked still has cost the others the wait."""
        way = blocked(pace_s=9.0)
        ways = [way, Way()]
        self.pace.window_wait_s(1.0, ways, anybody)
        way.blocked = False
        self.assertEqual(self.pace.charge_wait(9.0, ways), [])
        self.assertEqual(way.stalled_s, 0.0)

    def test_the_grace_grows_with_the_upload(self) -> None:
        """A quarter of what it has taken, where that is more than two seconds."""
        ways = [blocked(last_activity=100.0), Way(last_activity=100.0)]
        self.assertEqual(self.pace.window_wait_s(100.0, ways, anybody), 25.0)

    def test_waits_that_make_up_a_grace(self) -> None:
        """They are never shorter than the clock can tell."""
        ways = [blocked(stalled_s=1.9999999, last_activity=1.0), Way(last_activity=1.0)]
        self.assertEqual(self.pace.window_wait_s(1.0, ways, anybody), TICK_S)


class EndTests(SynchronousTestCase):
    """When all is sent."""

    def test_not_enough_yet(self) -> None:
        """Everything is waited for until its server is silent."""
        pace: StragglerPolicy[Way] = StragglerPolicy(SETTINGS, 0.0)
        self.assertEqual(pace.final_wait_s(9.0, [Way(last_activity=8.0)], False), 59.0)

    def test_stragglers(self) -> None:
        """From the moment on at which it is enough they have the grace."""
        pace: StragglerPolicy[Way] = StragglerPolicy(SETTINGS, 0.0)
        ways = [Way(last_activity=10.0)]
        self.assertEqual(pace.final_wait_s(10.0, ways, True), 2.5)
        self.assertEqual(pace.final_wait_s(12.0, ways, True), 0.5)
        self.assertIsNone(pace.final_wait_s(12.5, ways, True))

    def test_it_was_enough_before(self) -> None:
        """What went ahead in one move counts."""
        pace: StragglerPolicy[Way] = StragglerPolicy(SETTINGS, 0.0, happy_since_s=4.0)
        self.assertEqual(pace.final_wait_s(5.0, [Way(last_activity=5.0)], True), 1.0)

    def test_no_longer_enough(self) -> None:
        """A share that was lost is waited for again, and the grace is over when it has come."""
        pace: StragglerPolicy[Way] = StragglerPolicy(SETTINGS, 0.0)
        pace.final_wait_s(10.0, [Way()], True)
        self.assertEqual(pace.final_wait_s(20.0, [Way(last_activity=20.0)], False), 60.0)
        self.assertIsNone(pace.final_wait_s(21.0, [Way(last_activity=20.0)], True))
