"""Writers that know nothing of each other: no change that was acknowledged is ever lost."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.mutable.geometry import Format
from pipegrid.errors import UncoordinatedWriteError
from tests.transfer.mutable_world import MutableWorld
from tests.transfer.world import RTT, content


def add(word: str) -> Any:
    """Return an edit that puts a word into a list of words, once, as links are put into directories."""

    def edit(old: bytes) -> bytes:
        words = {*old.decode("ascii").split(), word}
        return " ".join(sorted(words)).encode("ascii")

    return edit


class WriterTests(SynchronousTestCase):
    """Many writers, one file."""

    def contend(self, seed: int, writers: int, rounds: int, start: bytes = b"") -> None:
        """Let writers add words, each one behind the other; look that all are there."""
        random = Random(seed)
        world = MutableWorld(patience_s=600)
        cap = world.create(start)
        said: list[str] = []
        failed: list[Any] = []
        left = writers * rounds

        def go_on(files: Any, writer: int, round_number: int) -> None:
            word = f"w{writer}r{round_number}"

            def done(_: Any) -> None:
                nonlocal left
                said.append(word)
                left -= 1
                if round_number + 1 < rounds:
                    pause = random.random() * RTT * 4
                    world.clock.callLater(pause, go_on, files, writer, round_number + 1)

            files.modify(cap, add(word)).addCallbacks(done, failed.append)

        for writer in range(writers):
            files = world.client(lines=world.far_lines(random))
            world.clock.callLater(random.random() * RTT / 8, go_on, files, writer, 0)
        world.run_until(lambda: left == 0 or failed, 3600)
        self.assertEqual(failed, [], f"seed {seed}")
        words = set(world.read(cap).decode("ascii").split())
        self.assertEqual(set(said) - words, set(), f"seed {seed}: lost")
        world.clock.advance(100)
        self.assertEqual(world.leftovers(), [])

    def test_two_writers_of_an_empty_file(self) -> None:
        """Both are told "done", and both changes are there."""
        for seed in range(20):
            self.contend(seed, 2, 2)

    def test_five_writers(self) -> None:
        """Five of an empty file, and of one with content."""
        for seed in range(10):
            self.contend(seed, 5, 3, b"" if seed % 2 else b"zero")

    def test_thirty_writers(self) -> None:
        """Thirty, of an empty file."""
        self.contend(1, 30, 2)

    def test_two_overwrites(self) -> None:
        """One wins and is told so; the other is told that it did not; what is there is the winner's."""
        for seed in range(20):
            random = Random(seed)
            world = MutableWorld()
            cap = world.create()
            outcomes = [
                world.begin(
                    world.client(lines=world.far_lines(random)).overwrite(
                        cap, content(1000, seed=name)
                    )
                )
                for name in ("a", "b")
            ]
            world.run_until(lambda: all(outcomes))  # noqa: B023
            errors = [o[0] for o in outcomes if hasattr(o[0], "value")]
            self.assertLessEqual(len(errors), 1, f"seed {seed}")
            for error in errors:
                self.assertIsInstance(error.value, UncoordinatedWriteError)
            found = world.read(cap)
            winners = [
                content(1000, seed=name)
                for name, outcome in zip("ab", outcomes, strict=True)
                if not hasattr(outcome[0], "value")
            ]
            self.assertIn(found, winners, f"seed {seed}")

    def test_others_unfinished_write(self) -> None:
        """A version that reached too few servers is waited for, and then written over."""
        world = MutableWorld()
        for format in (Format.SDMF, Format.MDMF):
            cap = world.create(b"zero", format)
            old = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
            world.run(world.client().overwrite(cap, b"half"))
            for line, shares in zip(world.lines[2:], old[2:], strict=True):
                line.storage.slots[cap.storage_index] = shares
            self.assertEqual(sorted(world.versions(cap)), [1, 2])
            self.assertEqual(world.read(cap), b"zero")
            world.run(world.client().modify(cap, add("one")))
            self.assertEqual(world.read(cap), b"one zero")
            self.assertEqual(world.versions(cap), {3: set(range(10))})

    def test_a_joined_edit_that_failed(self) -> None:
        """It does not find, when all are applied again, what was asked for behind it."""
        world = MutableWorld(first_wait_s=60.0, max_wait_s=60.0)
        cap = world.create(b"zero")
        old = {n: dict(line.storage.slots[cap.storage_index]) for n, line in enumerate(world.lines)}
        world.run(world.client().overwrite(cap, b"one"))
        applied: list[bytes] = []

        def needs_two(words: bytes) -> bytes:
            applied.append(words)
            world.lines[3].storage.slots[cap.storage_index] = old[3]  # which will refuse
            if b"two" not in words:
                raise ValueError("no two")
            return words + b" three"

        files = world.client()
        failing = world.begin(files.modify(cap, needs_two))
        joined = world.begin(files.modify(cap, add("two")))
        world.clock.advance(0)
        while not world.versions(cap).get(3):
            world.clock.advance(RTT / 4)
        world.clock.advance(RTT)
        world.run(world.client().modify(cap, add("other")))
        world.run_until(lambda: bool(joined))
        self.assertEqual(joined[0].attempts, 2)
        self.assertIsInstance(failing[0].value, ValueError)
        self.assertEqual(applied, [b"one"])
        self.assertEqual(world.read(cap), b"one other two")
