"""Who makes room for whom."""

from __future__ import annotations

import random

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.server.listener import QUIET_S, ConnectionLimits


@attrs.define(eq=False)
class Guest:
    """A connection."""

    name: str = ""
    quiet: float = 0.0

    def quiet_s(self) -> float:
        """For so long."""
        return self.quiet


class CrowdTests(SynchronousTestCase):
    """A hundred connections, fifty from one address."""

    def setUp(self) -> None:
        self.crowd: ConnectionLimits[Guest] = ConnectionLimits(100, max_closing=10_000)

    def enter(self, host: str, count: int = 1, known: bool = False, **more: float) -> list[Guest]:
        """Let connections in for which there is room."""
        guests = [Guest(f"{host} {number}", **more) for number in range(count)]
        for guest in guests:
            self.assertIsNone(self.crowd.enter(guest, host))
            if known:
                self.crowd.mark_known(guest)
        return guests

    def test_room(self) -> None:
        """Up to the number nobody goes."""
        self.enter("a", 50)
        self.enter("b", 50)
        self.assertEqual((len(self.crowd), self.crowd.unauthenticated), (100, 100))

    def test_one_address(self) -> None:
        """Beyond half of all, an address's own oldest stranger goes."""
        first, second, *_ = self.enter("a", 50)
        self.assertIs(self.crowd.enter(Guest(), "a"), first)
        self.assertIs(self.crowd.enter(Guest(), "a"), second)
        self.enter("b", 50)

    def test_a_flood_shuts_out_nobody(self) -> None:
        """Strangers from many addresses do not make those go who come from elsewhere, nor the known."""
        rng = random.Random(7)
        honest = self.enter("honest", 1)
        known = self.enter("known", 20, known=True, quiet=1000.0)
        for _ in range(5000):
            victim = self.crowd.enter(Guest(), f"flood {rng.randrange(4)}")
            self.assertNotIn(victim, [*honest, *known])
        newcomer = Guest("newcomer")
        victim = self.crowd.enter(newcomer, "honest")
        assert victim is not None
        self.assertEqual(victim.name, "")
        self.assertEqual(len(self.crowd), 100)

    def test_from_the_same_address_there_is_time(self) -> None:
        """A newcomer at the address of a flood goes when all its places are filled anew, not before."""
        self.enter("a", 50)
        newcomer = Guest()
        self.crowd.enter(newcomer, "a")
        for _ in range(49):
            self.assertIsNot(self.crowd.enter(Guest(), "a"), newcomer)
        self.crowd.mark_known(newcomer)
        for _ in range(1000):
            self.assertIsNot(self.crowd.enter(Guest(), "a"), newcomer)

    def test_in_one_turn_few_are_cut(self) -> None:
        """Those that were cut and are not gone are counted, so that a burst is bounded."""
        self.crowd = ConnectionLimits(100, 100, max_closing=10)
        guests = self.enter("a", 100)
        cut = [self.crowd.enter(Guest(), "a") for _ in range(10)]
        self.assertEqual(cut, guests[:10])
        newcomer = Guest()
        self.assertIs(self.crowd.enter(newcomer, "a"), newcomer)
        self.crowd.leave(guests[0])
        self.assertIs(self.crowd.enter(newcomer, "a"), guests[10])
        self.assertEqual(len(self.crowd), 100)

    def test_the_known_make_room_when_they_are_quiet(self) -> None:
        """Whoever knows the secret cannot shut out the others by doing nothing; the quietest goes."""
        for host in ("a", "b"):
            self.enter(host, 49, known=True, quiet=QUIET_S)
        [quietest] = self.enter("a", 1, known=True, quiet=QUIET_S + 1)
        self.enter("b", 1, known=True, quiet=0)
        self.assertIs(self.crowd.enter(Guest(), "c"), quietest)
        self.assertEqual(self.crowd.unauthenticated, 1)

    def test_strangers_keep_an_eighth(self) -> None:
        """A flood against a server full of quiet known ones leaves a newcomer more than a moment."""
        self.enter("a", 50, known=True, quiet=60.0)
        self.enter("b", 50, known=True, quiet=60.0)
        newcomer = Guest()
        self.crowd.enter(newcomer, "c")
        for _ in range(12):
            self.assertIsNot(self.crowd.enter(Guest(), "c"), newcomer)
        self.assertGreaterEqual(self.crowd.unauthenticated, 12)

    def test_nobody_can_be_spared(self) -> None:
        """Where all know the secret and are at work, the newcomer goes."""
        guests = self.enter("a", 50, known=True) + self.enter("b", 50, known=True)
        newcomer = Guest()
        self.assertIs(self.crowd.enter(newcomer, "c"), newcomer)
        self.crowd.leave(newcomer)  # it was never there
        self.crowd.leave(guests[0])
        self.crowd.leave(guests[0])
        self.assertIsNone(self.crowd.enter(newcomer, "c"))
        self.assertEqual(len(self.crowd), 100)

    def test_an_address_full_of_the_known(self) -> None:
        """Its quiet ones make room for it; else it is turned away, and others are not."""
        guests = self.enter("a", 50, known=True)
        newcomer = Guest()
        self.assertIs(self.crowd.enter(newcomer, "a"), newcomer)
        guests[7].quiet = QUIET_S
        self.assertIs(self.crowd.enter(newcomer, "a"), guests[7])
        self.enter("b")

    def test_books(self) -> None:
        """Whatever comes and goes, numbers add up and limits hold; seed 5."""
        rng = random.Random(5)
        inside: list[Guest] = []
        for _ in range(20_000):
            what = rng.random()
            if what < 0.6 or not inside:
                guest = Guest(quiet=rng.choice([0.0, 50.0]))
                victim = self.crowd.enter(guest, str(int(rng.expovariate(0.5))))
                if victim is not guest:
                    inside.append(guest)
                    if victim is not None:
                        inside.remove(victim)
            elif what < 0.8:
                self.crowd.mark_known(rng.choice(inside))
            else:
                self.crowd.leave(inside.pop(rng.randrange(len(inside))))
            self.assertEqual(len(self.crowd), len(inside))
            self.assertLessEqual(len(inside), 100)
        for guest in inside:
            self.crowd.leave(guest)
        self.assertEqual((len(self.crowd), self.crowd.unauthenticated), (0, 0))
        self.assertEqual((self.crowd._known, self.crowd._strangers), ({}, {}))

    def test_numbers(self) -> None:
        """An address may have half of all, or what an operator says, but never more than all."""
        self.assertEqual(ConnectionLimits(1).max_per_address, 1)
        self.assertEqual(ConnectionLimits(1000).max_per_address, 500)
        self.assertEqual(ConnectionLimits(16, 1000).max_per_address, 16)
