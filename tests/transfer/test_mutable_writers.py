"""Writers that know nothing of each other: no change that was acknowledged is ever lost."""

from __future__ import annotations

from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import DirectoryCap, LitCap
from pipegrid.core.mutable.directory_content_edits import Edit, Link, Rename, Unlink, unpack_entries
from pipegrid.core.mutable.versions import Format
from pipegrid.errors import UncoordinatedWriteError
from pipegrid.tree.directory import Directory
from tests.transfer.mutable_world import MutableWorld
from tests.transfer.world import RTT, content

A, B, C, D = (LitCap(text) for text in (b"a", b"b", b"c", b"d"))


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
        world = MutableWorld(time_limit_s=600)
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


class StoredUnknownTests(SynchronousTestCase):
    """A change of a directory is stored, its writer does not know it, and somebody else builds on it."""

    def attempt(self, changes: list[list[Edit]], others: list[Edit]) -> dict[str, Any]:
        """Return what is there at last, where "a" and "b" were."""
        world = MutableWorld(first_wait_s=60.0, max_wait_s=60.0)
        cap = world.create(b"")
        slots = world.lines[3].storage.slots
        old = dict(slots[cap.storage_index])
        first: list[Edit] = [Link("a", A), Link("b", B)]
        world.run(self.directory(world, cap).change(first))
        times = count(10)

        def now() -> float:
            if (time_s := next(times)) == 10:
                slots[cap.storage_index] = old  # it will refuse what is written now
            return float(time_s)

        directory = self.directory(world, cap, now)
        waiting = [world.begin(directory.change(edits)) for edits in changes]
        while not world.versions(cap).get(3):
            world.clock.advance(RTT / 4)
        world.clock.advance(RTT)
        world.run(self.directory(world, cap, lambda: 50.0).change(others))
        world.run_until(lambda: all(waiting))
        self.assertEqual([outcome[0].attempts for outcome in waiting], [2] * len(changes))
        found = unpack_entries(world.read(cap))
        return {name: entry.read_cap for name, entry in found.items()}

    def test_asked_twice(self) -> None:
        """Who lost all connections, and asks again when others have built on it, does not make it again."""
        world = MutableWorld()
        cap = world.create(b"")
        first: list[Edit] = [Link("a", A), Link("b", B)]
        world.run(self.directory(world, cap).change(first))
        own = [world.line_of(number, RTT) for number in range(10)]
        times = count(10)

        def now() -> float:
            time_s = next(times)
            for line in own if time_s == 10 else ():
                line.answers_lost.add("read_test_write")
                line.late["read_test_write"] = 5.0
            return float(time_s)

        edits: list[Edit] = [Rename("a", "x"), Rename("b", "a"), Rename("x", "b")]
        waiting = world.begin(self.directory(world, cap, now, own).change(edits))
        world.run_until(lambda: bool(world.versions(cap).get(3)))
        world.clock.advance(RTT)
        world.run(self.directory(world, cap, lambda: 50.0).change([Link("new", C)]))
        for line in own:
            line.answers_lost.clear()
            line.late.clear()
        world.run_until(lambda: bool(waiting))
        self.assertEqual(waiting[0].attempts, 2)
        found = unpack_entries(world.read(cap))
        caps = {name: entry.read_cap for name, entry in found.items()}
        self.assertEqual(caps, {"a": B, "b": A, "new": C})

    def directory(
        self, world: MutableWorld, cap: Any, now: Any = lambda: 1.0, lines: Any = None
    ) -> Directory:
        """Return the directory, as a client of its own changes it."""
        files = world.client(lines=lines)

        def modify(cap: Any, *given: Any, **options: Any) -> Any:
            return files.modify(cap.file, *given, **options)

        grid: Any = SimpleNamespace(modify=modify)
        return Directory(grid, DirectoryCap(cap), now)

    def test_names_exchanged(self) -> None:
        """They are not exchanged back, be it one change or several that were joined."""
        edits: list[Edit] = [Rename("a", "x"), Rename("b", "a"), Rename("x", "b")]
        for changes in ([edits], [[edit] for edit in edits]):
            found = self.attempt(changes, [Link("new", C)])
            self.assertEqual(found, {"a": B, "b": A, "new": C})

    def test_linked_in_the_place_of_one_renamed(self) -> None:
        """The new child does not take the name of the old one, nor is the old one lost."""
        edits: list[Edit] = [Rename("a", "b"), Link("a", C, replace=False)]
        self.assertEqual(self.attempt([edits], [Link("new", D)]), {"a": C, "b": A, "new": D})

    def test_linked_by_others(self) -> None:
        """What somebody was told to be linked, where a child was renamed, stays there."""
        found = self.attempt([[Rename("a", "z")]], [Link("a", D, replace=False)])
        self.assertEqual(found, {"a": D, "b": B, "z": A})

    def test_renamed_twice(self) -> None:
        """It is no error that there is no child of the old name any more, nor one of the one between."""
        edits: list[Edit] = [Rename("a", "x", replace=False), Rename("x", "y")]
        self.assertEqual(self.attempt([edits], [Link("new", D)]), {"b": B, "new": D, "y": A})
        edits = [Rename("a", "x"), Unlink("x")]
        self.assertEqual(self.attempt([edits], [Link("new", D)]), {"b": B, "new": D})

    def test_renamed_twice_by_changes_that_were_joined(self) -> None:
        """They were stored as one, and so the one behind has passed on what the first has made."""
        for replace in (False, True):
            edits: list[Edit] = [Rename("a", "x", replace), Rename("x", "y", replace)]
            found = self.attempt([[edit] for edit in edits], [Link("new", D)])
            self.assertEqual(found, {"b": B, "new": D, "y": A})
            edits = [Rename("a", "x", replace), Unlink("x")]
            found = self.attempt([[edit] for edit in edits], [Link("new", D)])
            self.assertEqual(found, {"b": B, "new": D})

    def test_linked_twice(self) -> None:
        """What a change has linked itself is not in its way."""
        edits: list[Edit] = [Link("x", C, replace=False), Link("x", D)]
        self.assertEqual(self.attempt([edits], [Link("y", C)]), {"a": A, "b": B, "x": D, "y": C})

    def test_answers_that_were_lost(self) -> None:
        """What may be stored is looked for, also if it was written from what was remembered."""
        world = MutableWorld()
        cap = world.create(b"")
        slots = [line.storage.slots for line in world.lines]
        old = {number: share for each in slots for number, share in each[cap.storage_index].items()}
        times = count(10)

        def now() -> float:
            if (time_s := next(times)) == 11:
                slots[3][cap.storage_index] = old  # it will refuse, whatever is written
                world.lines[3].late["read_test_write"] = 10.0
                for line in world.lines[:3] + world.lines[4:]:
                    line.answers_lost.add("*")
            return float(time_s)

        directory = self.directory(world, cap, now)
        world.run(directory.change([Link("a", A), Link("b", B)]))
        edits: list[Edit] = [Rename("a", "x"), Rename("b", "a"), Rename("x", "b")]
        changing = world.begin(directory.change(edits))
        for _ in range(200):
            world.clock.advance(RTT / 4)
        for line in world.lines:
            line.answers_lost.clear()
            line.late.clear()
        world.run_until(lambda: bool(changing))
        self.assertEqual(changing[0].version.sequence_number, 4)
        self.assertEqual(world.versions(cap), {4: set(range(10))})
        found = unpack_entries(world.read(cap))
        self.assertEqual({name: entry.read_cap for name, entry in found.items()}, {"a": B, "b": A})
