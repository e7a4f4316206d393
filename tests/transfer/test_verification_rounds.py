"""Which objects a run verifies, and that a round verifies all of them."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from random import Random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import SinkError
from pipegrid.transfer.verification_rotation import (
    CIRCLE,
    VerificationRound,
    VerificationRounds,
    VerifiedPart,
    width_of,
)

NIGHTS = 34
"""Of 3 % each: 100 / 3, rounded up."""


class RoundTests(SynchronousTestCase):
    """Positions, and their file."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def night(self, key: object = "home:", percent: Fraction = Fraction(3)) -> VerifiedPart:
        """Run one check of a new process; returns its part."""
        rounds = VerificationRounds(self.directory, key)
        width = width_of(percent)
        part = VerifiedPart(rounds.state.position, width)
        rounds.finish(width)
        return part

    def test_everything_is_covered_although_the_tree_changes(self) -> None:
        """What is there for 34 nights is verified at least once in them, from whatever night on."""
        random = Random(1)
        objects: dict[bytes, int] = {random.randbytes(16): 0 for _ in range(500)}
        unverified = dict(objects)
        for night in range(3 * NIGHTS):
            part = self.night()
            for index in [each for each in objects if part.has(each)]:
                unverified[index] = night + 1
            for since in unverified.values():
                self.assertLess(night - since, NIGHTS)
            for index in random.sample(sorted(objects), 20):  # files that were removed
                del objects[index], unverified[index]
            added = {random.randbytes(16): night + 1 for _ in range(20)}
            objects |= added
            unverified |= added

    def test_a_part_is_as_large_as_asked(self) -> None:
        """About; and parts of one round do not overlap."""
        random = Random(2)
        objects = [random.randbytes(16) for _ in range(4000)]
        counts = [0] * len(objects)
        for _ in range(NIGHTS - 1):
            part = self.night()
            found = [number for number, index in enumerate(objects) if part.has(index)]
            self.assertTrue(60 < len(found) < 200, len(found))
            for number in found:
                counts[number] += 1
        self.assertEqual(max(counts), 1)
        self.assertGreater(sum(counts), 0.98 * len(objects))

    def test_where_a_round_is(self) -> None:
        """How many runs are left, and that a new round follows."""
        width = width_of(Fraction(3))
        state = VerificationRound(CIRCLE - 5)
        self.assertEqual(state.runs_left(width), NIGHTS)
        for _ in range(NIGHTS - 1):
            state = state.after(width)
        self.assertEqual(state.runs_left(width), 1)
        self.assertEqual(state.after(width).covered, 0)
        self.assertEqual(width_of(Fraction(100)), CIRCLE)
        self.assertEqual(VerificationRound(7).after(CIRCLE), VerificationRound(7))
        self.assertTrue(VerifiedPart(9, CIRCLE).has(b"any"))

    def test_two_runs_at_once(self) -> None:
        """Both verify the same part, and the position moves once."""
        width = width_of(Fraction(10))
        one, two = (VerificationRounds(self.directory, "a") for _ in range(2))
        self.assertEqual(one.state, two.state)
        self.assertEqual(one.finish(width), two.finish(width))
        self.assertEqual(VerificationRounds(self.directory, "a").state.covered, width)

    def test_checks_and_machines_are_independent(self) -> None:
        """Each has its own position, which begins anywhere; a check is not named in the file."""
        key = ("URI:DIR2:secret", "home:")
        one = VerificationRounds(self.directory, key).state
        self.night(key="other:")
        self.assertEqual(VerificationRounds(self.directory, key).state, one)
        other = VerificationRounds(Path(self.mktemp()), key).state
        self.assertNotEqual(one, other)
        text = (self.directory / "verification.json").read_text()
        self.assertNotIn("secret", text)

    def test_damage(self) -> None:
        """A damaged file is reported and replaced; one that cannot be written is an error."""
        self.night()
        path = self.directory / "verification.json"
        for damage in (b"", b"{", b"[]", b'{"a": [1, 2]}', b'{"a": ["-1", "0"]}', b"[" * 100_000):
            path.write_bytes(damage)
            rounds = VerificationRounds(self.directory, "home:")
            self.assertIn("is damaged; a new round begins", rounds.warning, damage)
            self.assertEqual(VerificationRounds(self.directory, "home:").warning, "")
        taken = Path(self.mktemp())
        taken.touch()
        with self.assertRaisesRegex(SinkError, "cannot write in"):
            VerificationRounds(taken / "below", "a")
        self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
