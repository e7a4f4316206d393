"""Of many files at once no lists are asked for, as long as shares are where they were guessed."""

from __future__ import annotations

from io import BytesIO

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import NotEnoughSharesError
from pipegrid.transfer.get.get_history import MANY, RIGHT_TIMES, Guesses
from tests.core.simple_encoder import Encoded
from tests.transfer.world import RTT, World, content

FILES = 30
SIZE = 200


class GuessesTests(SynchronousTestCase):
    """When lists can be left out."""

    def test_one_file(self) -> None:
        """It never does without."""
        guesses = Guesses()
        for _ in range(100):
            self.assertTrue(guesses.needs_lists)
            guesses.began()
            guesses.found(True)
            guesses.ended()

    def test_many_files(self) -> None:
        """All but the first few do, once something was found where it was guessed."""
        guesses = Guesses()
        for _ in range(MANY):
            guesses.began()
        self.assertTrue(guesses.needs_lists)
        guesses.found(True)
        self.assertFalse(guesses.needs_lists)
        guesses.ended()
        self.assertTrue(guesses.needs_lists)

    def test_a_tree(self) -> None:
        """Its files do without lists however few are running, once something was found."""
        guesses = Guesses()
        guesses.trees += 1
        self.assertTrue(guesses.needs_lists)
        guesses.found(True)
        self.assertFalse(guesses.needs_lists)
        guesses.trees -= 1
        self.assertTrue(guesses.needs_lists)

    def test_wrong_guesses(self) -> None:
        """One in four is no reason to ask for lists; more are remembered for some files."""
        guesses = Guesses()
        for _ in range(MANY):
            guesses.began()
        guesses.found(False)
        for _ in range(RIGHT_TIMES - 2):
            guesses.found(True)
            self.assertTrue(guesses.needs_lists)
        for right in [True] * 12 + [False, True, True, True] * 5:
            guesses.found(right)
            self.assertFalse(guesses.needs_lists)
        for _ in range(16):
            guesses.found(False)
        for _ in range(12):
            self.assertTrue(guesses.needs_lists)
            guesses.found(True)
        self.assertFalse(guesses.needs_lists)


class ManyFilesTests(SynchronousTestCase):
    """Downloads, side by side."""

    def setUp(self) -> None:
        self.world = World()
        self.files = [self.world.encoded(content(SIZE, seed)) for seed in range(FILES)]

    def plant(self, file: Encoded, shift: int = 0) -> None:
        """Put each share where it is looked for, or so many servers further."""
        ring = self.world.ring(file)
        self.world.plant(file, {n: ring[(n + shift) % len(ring)] for n in range(10)})

    def get_all(self) -> float:
        """Fetch all at once; returns how long it took."""
        sinks = [BytesIO() for _ in self.files]
        gets = [
            self.world.grid.get(file.cap, sink)
            for file, sink in zip(self.files, sinks, strict=True)
        ]
        _, took_s = self.world.timed(gatherResults(gets))
        for seed, sink in enumerate(sinks):
            self.assertEqual(sink.getvalue(), content(SIZE, seed))
        return took_s

    @property
    def lists(self) -> int:
        return sum(line.count("list_shares") for line in self.world.lines)

    def test_in_their_places(self) -> None:
        """The first time lists are asked for; later only of the first few."""
        for file in self.files:
            self.plant(file)
        self.assertEqual(self.get_all(), RTT)
        self.assertEqual(self.lists, 4 * FILES)
        self.assertEqual(self.get_all(), RTT)
        self.assertEqual(self.lists, 4 * FILES + 4 * MANY)

    def test_elsewhere(self) -> None:
        """Files whose shares are not where they were guessed take a round trip more, once."""
        for file in self.files:
            self.plant(file)
        self.get_all()
        for line in self.world.lines:
            line.storage.shares.clear()
        for file in self.files:
            self.plant(file, 5)
        self.assertEqual(self.get_all(), 3 * RTT)
        self.assertEqual(self.get_all(), 2 * RTT)

    def test_a_few_elsewhere(self) -> None:
        """They take a round trip more, and only they ask for lists."""
        for file in self.files:
            self.plant(file)
        self.get_all()
        moved = self.files[MANY :: len(self.files) // 3]
        for file in moved:
            for line in self.world.lines:
                for number in range(10):
                    line.storage.shares.pop((file.cap.storage_index, number), None)
            self.plant(file, 5)
        before = self.lists
        self.assertEqual(self.get_all(), 3 * RTT)
        first = self.lists - before
        self.assertLessEqual(self.get_all(), 3 * RTT)
        self.assertLessEqual(self.lists - before - first, 4 * MANY + 10 * len(moved))

    def test_one_that_fails(self) -> None:
        """Nothing is left of it."""
        self.plant(self.files[0])
        for line in self.world.lines:
            line.down = True
        failing = self.world.grid.get(self.files[0].cap, BytesIO())
        with self.assertRaises(NotEnoughSharesError):
            self.world.run(failing)
        self.assertEqual(self.world.grid._earlier.guesses._running, 0)
