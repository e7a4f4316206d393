"""Directories that can change, on real servers of a simulated network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import DeferredList

from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, MutableCap, parse_cap
from pipegrid.core.mutable import directory_content_edits
from pipegrid.core.mutable.directory_content_edits import (
    MAX_CHILDREN,
    MAX_NAME_BYTES,
    Link,
    Rename,
    Unlink,
)
from pipegrid.errors import CapError, ChildExists, NoSuchChild, UnhappyError, UsageError
from pipegrid.tree.directory import Directory, create_directory, look_up, make_directories, move
from pipegrid.tree.directory_reading import ListingLimits
from pipegrid.tree.tree_grid import Trees
from tests.grid.test_mutables import GridTestCase

A, B = LitCap(b"a"), LitCap(b"b")


class DirectoryTests(GridTestCase):
    """Names are changed, and nobody's change is lost."""

    def setUp(self) -> None:
        super().setUp()
        self.directory = self.make(self.grid)

    def make(self, grid: Any) -> Directory:
        """Return a new directory."""
        made: Directory = self.world.run(_started(create_directory(grid)))
        return made

    def names(self, directory: Directory | None = None) -> list[str]:
        """Return what is in it."""
        children: dict[str, Any] = self.world.run((directory or self.directory).list())
        return list(children)

    def test_changes(self) -> None:
        """Links, names and metadata; several of them are one version."""
        run, directory = self.world.run, self.directory
        run(directory.link("a", A, metadata={"kept": 1}))
        result = run(directory.change([Rename("a", "c"), Link("b", B), Link("x", A), Unlink("x")]))
        self.assertEqual(result.version.sequence_number, 3)
        children = run(directory.list())
        self.assertEqual(list(children), ["b", "c"])
        self.assertEqual((children["c"].cap, children["c"].metadata["kept"]), (A, 1))
        self.failureOf(directory.link("b", A), ChildExists)
        self.failureOf(directory.unlink("no"), NoSuchChild)
        self.failureOf(directory.change([Unlink("b"), Unlink("no")]), NoSuchChild)
        self.assertEqual(self.names(), ["b", "c"])

    def test_many_changes_at_once(self) -> None:
        """
        They take the directory apart once, and not each: a thousand would take minutes in a large one.

        Each fails for itself, and what a function of somebody's makes of the bytes goes between them.
        """
        taken: list[int] = []
        real = directory_content_edits.unpack_entries

        def counted(data: bytes) -> Any:
            taken.append(len(data))
            return real(data)

        self.patch(directory_content_edits, "unpack_entries", counted)
        directory = self.directory
        waiting: list[Any] = [directory.link(f"n{n:03}", A) for n in range(100)]
        waiting += [
            directory.link("n000", B),
            directory.unlink("no"),
            directory.rename("n001", "x"),
        ]
        seen: list[bytes] = []

        def note(old: bytes) -> bytes:
            seen.append(old)
            return old

        waiting.append(self.grid.modify(directory.cap, note))
        waiting.append(directory.unlink("x"))
        outcomes = self.world.run(DeferredList(waiting, consumeErrors=True))
        failed = {number: each.type for number, (good, each) in enumerate(outcomes) if not good}
        self.assertEqual(failed, {100: ChildExists, 101: NoSuchChild})
        self.assertLess(len(taken), 12)
        self.assertIn("x", real(seen[-1]))
        self.assertEqual(self.names(), [f"n{n:03}" for n in range(100) if n != 1])
        made = {each.version.sequence_number for good, each in outcomes if good}
        self.assertLessEqual(len(made), 2)

    def failureOf(self, waiting: Any, kind: type[Exception]) -> None:
        """Assert how something fails."""
        with self.assertRaises(kind):
            self.world.run(waiting)

    def test_caps(self) -> None:
        """Writers see write caps, readers do not; who cannot write is told so."""
        inner = self.make(self.grid)
        self.world.run(self.directory.link("d", inner.cap))
        reader = Directory(self.grid, self.directory.cap.readonly())
        self.assertEqual(self.world.run(self.directory.list())["d"].cap, inner.cap)
        child = self.world.run(reader.list())["d"]
        self.assertEqual((child.write_cap, child.cap), (None, inner.cap.readonly()))
        for cap in (reader.cap, self.directory.cap.verifier(), DirectoryCap(LitCap(b""))):
            assert cap is not None
            self.failureOf(Directory(self.grid, cap).link("x", A), CapError)
        self.failureOf(self.directory.link("x", ""), CapError)
        with self.assertRaises(CapError):
            Directory(self.grid, inner.cap.file)
        self.assertIsInstance(inner.cap.file, MutableCap)

    def test_wrong_arguments(self) -> None:
        """Are told in a sentence, before anything is written; a name that no path could lead to as well."""
        directory, grid = self.directory, self.grid
        trees = Trees(grid)
        wrong: Any = 5
        changes: list[tuple[Any, str]] = [
            (lambda: directory.link(wrong, A), "the name of a child is text, not 5 (int)"),
            (lambda: directory.link("a", wrong), "a capability is text, or what a put gave"),
            (lambda: directory.link("", A), "a character at least"),
            (lambda: directory.put("", b"x"), "a character at least"),
            (lambda: directory.put(wrong, b"x"), "the name of a child is text, not 5 (int)"),
            (lambda: directory.unlink(wrong), "the name of a child is text, not 5 (int)"),
            (lambda: directory.rename(wrong, "a"), "the name of a child is text, not 5 (int)"),
            (lambda: directory.rename("a", ""), "a character at least"),
            (lambda: directory.change(wrong), "a list of edits, not 5 (int)"),
            (lambda: directory.change([wrong]), "a Rename or a SetMetadata, not 5 (int)"),
            (lambda: directory.change([Link("a", wrong)]), "a capability is text"),
            (lambda: directory.change([Link("a", A, read_cap=wrong)]), "a capability is text"),
            (lambda: directory.link("a", A, metadata=wrong), "the metadata of a child is a dict"),
            (lambda: directory.put("a", b"x", metadata=wrong), "the metadata of a child is a dict"),
            (lambda: directory.put("a", b"x", stored=wrong), "stored is a function to be called"),
            (lambda: trees.resolve(wrong), "a path on a grid is text, not 5 (int)"),
            (lambda: trees.list_directory(wrong), "a capability is text"),
            (lambda: trees.get_tree(wrong, "x"), "a capability is text"),
        ]
        for change, words in changes:
            with self.assertRaises(UsageError) as caught:
                self.world.run(change())
            self.assertIn(words, str(caught.exception))
        self.assertEqual(self.names(), [])

    def test_caps_as_text(self) -> None:
        """An edit may have a cap as its text, which is shown neither with the edit nor in an error."""
        text = str(ChkCap(b"k" * 16, b"h" * 32, 3, 10, 5000))
        link: Any = Link("a", text)  # type: ignore[arg-type]
        self.assertNotIn(text.split(":")[2], repr(link) + repr(Link("a", parse_cap(text))))
        self.world.run(self.directory.change([link]))
        self.assertEqual(self.world.run(self.directory.list())["a"].cap, parse_cap(text))
        given: Any = ([("b", str(A))], [str(A).encode()])
        for wrong in given:
            with self.assertRaises(UsageError) as caught:
                self.world.run(self.directory.change(wrong))
            self.assertNotIn("URI", str(caught.exception))

    def test_two_writers(self) -> None:
        """Both links are there, also in a directory that was empty."""
        other = Directory(self.open(), self.directory.cap)
        first, second = self.directory.link("a", A), other.link("b", B)
        self.world.run(first)
        self.world.run(second)
        self.assertEqual(self.names(), ["a", "b"])

    def test_what_is_remembered_decides_nothing(self) -> None:
        """That a name is there, or not, is said only of what servers have: others may have changed it."""
        run, directory = self.world.run, self.directory
        run(directory.link("mine", A))
        other = Directory(self.open(), directory.cap)
        run(other.change([Link("new", B), Unlink("mine")]))
        run(directory.unlink("new"))
        self.assertEqual(self.names(), [])
        run(other.link("mine", B))
        run(other.unlink("mine"))
        run(directory.link("mine", A))
        self.assertEqual(self.names(), ["mine"])
        run(other.unlink("mine"))
        # Nothing is changed by this in the eyes of one who remembers; it is not done without a look.
        run(directory.unlink("gone", must_exist=False))
        run(other.link("gone", A))
        run(directory.unlink("gone", must_exist=False))
        self.assertEqual(self.names(), [])
        self.failureOf(directory.unlink("mine"), NoSuchChild)

    def test_one_of_several_fails(self) -> None:
        """Of changes that are joined each is judged by what servers have, and the others are made."""
        run, directory = self.world.run, self.directory
        run(directory.link("a", A))
        run(Directory(self.open(), directory.cap).change([Unlink("a"), Link("b", B)]))
        waiting = [directory.link("a", B), directory.unlink("b"), directory.unlink("c")]
        for each in waiting[:2]:
            run(each)
        self.failureOf(waiting[2], NoSuchChild)
        self.assertEqual(self.names(), ["a"])

    def test_many_links(self) -> None:
        """A thousand links are few versions, asked for one by one."""
        waiting = [self.directory.link(f"n{number}", A) for number in range(1000)]
        results = [self.world.run(each) for each in waiting]
        self.assertLessEqual(max(each.version.sequence_number for each in results), 6)
        self.assertEqual(len(self.names()), 1000)

    def test_large_directories_are_read_and_parsed_once(self) -> None:
        """Changes one after another take a round trip each, until another client has made one, too."""
        many = [Link(f"{n:04}", A, metadata={"k": "x" * 200}) for n in range(4000)]
        self.world.run(self.directory.change(many))
        parsed: list[int] = []
        unpack = directory_content_edits.unpack_entries

        def counted(data: bytes) -> Any:
            parsed.append(len(data))
            return unpack(data)

        self.patch(directory_content_edits, "unpack_entries", counted)
        began_s = self.world.clock.seconds()
        for n in range(5):
            self.world.run(self.directory.link(f"new {n}", B))
        self.assertLess(self.world.clock.seconds() - began_s, 5 * 0.15)
        self.assertEqual(parsed, [])
        other = Directory(self.open(), self.directory.cap)
        self.world.run(other.link("other", B))
        self.world.run(self.directory.unlink("0000"))
        self.assertEqual(len(self.names()), 4000 + 5 + 1 - 1)
        self.assertGreater(min(parsed), 1 << 20)

    def test_move(self) -> None:
        """From one directory into another, with metadata; a child that was replaced meanwhile stays."""
        target = self.make(self.grid)
        self.world.run(self.directory.link("a", A, metadata={"kept": 1}))
        self.world.run(_started(move(self.directory, "a", target, "z")))
        self.assertEqual(self.names(), [])
        self.assertEqual(self.world.run(target.list())["z"].metadata["kept"], 1)
        seen = self.world.run(target.list())["z"]
        self.world.run(target.link("z", B, replace=True))
        self.assertFalse(self.world.run(_started(target.unlink_same("z", seen))))
        self.assertEqual(self.names(target), ["z"])
        self.failureOf(_started(move(target, "no", self.directory, "no")), NoSuchChild)

    def test_a_move_whose_second_half_fails(self) -> None:
        """The error says that both names are there; the same move again finishes it, and replaces nothing."""
        run, target = self.world.run, self.make(self.grid)
        run(self.directory.link("a", A))

        async def failing(*_: Any) -> bool:
            raise UnhappyError("too few servers took it", 2, 7)

        with self.patched_unlink(failing):
            waiting = _started(move(self.directory, "a", target, "z"))
            error = self.assertRaises(UnhappyError, run, waiting)
        self.assertIn("'a' is now in both places", str(error))
        self.assertIn("too few servers took it", str(error))
        self.assertEqual((error.reached, error.wanted), (2, 7))
        self.assertEqual((self.names(), self.names(target)), (["a"], ["z"]))
        run(target.link("other", B))
        self.failureOf(_started(move(self.directory, "a", target, "other")), ChildExists)
        self.assertEqual(self.names(), ["a"])
        run(_started(move(self.directory, "a", target, "z")))
        self.assertEqual((self.names(), self.names(target)), ([], ["other", "z"]))

    @contextlib.contextmanager
    def patched_unlink(self, unlink: Any) -> Iterator[None]:
        """Have directories take nothing out."""
        before = Directory.unlink_same
        Directory.unlink_same = unlink  # type: ignore[method-assign]
        try:
            yield
        finally:
            Directory.unlink_same = before  # type: ignore[method-assign]

    def test_aliases(self) -> None:
        """Programs name places as commands do, by the aliases of the client's directory."""
        home = Path(self.mktemp())
        (home / "private").mkdir(parents=True)
        (home / "private/aliases").write_text(f"home: {self.directory.cap}\n")
        self.grid.config = attrs.evolve(self.grid.config, directory=home)
        self.world.run(self.directory.link("a", A))
        trees = Trees(self.grid)
        self.assertEqual(self.world.run(trees.resolve("home:a")).cap, A)
        self.assertEqual(self.world.run(trees.resolve(f"{self.directory.cap}/a")).cap, A)
        with self.assertRaisesRegex(UsageError, "did you mean 'home'"):
            self.world.run(trees.resolve("hom:a"))

    def test_names_that_no_child_can_have(self) -> None:
        """They are refused before anything is stored or made; what is linked can be listed."""
        self.assertEqual(ListingLimits().name_bytes, MAX_NAME_BYTES)
        self.assertEqual(ListingLimits().entries, MAX_CHILDREN)
        self.world.run(self.directory.link("é" * (MAX_NAME_BYTES // 2), A))
        self.assertEqual(len(self.names()), 1)
        for name in ("x" * (MAX_NAME_BYTES + 1), "\udcfe", ""):
            path = (self.directory.cap, ("a", name))
            self.failureOf(_started(make_directories(self.grid, *path)), UsageError)
            self.failureOf(self.directory.put(name, b"never stored", stored=self.fail), UsageError)
            self.failureOf(self.directory.link(name, A), UsageError)
        self.assertEqual(len(self.names()), 1)

    def test_paths(self) -> None:
        """What is missing of a path is made, and made once."""
        path = ("a", "b", "c")
        made = self.world.run(_started(make_directories(self.grid, self.directory.cap, path)))
        again = self.world.run(_started(make_directories(self.grid, self.directory.cap, path)))
        self.assertEqual(made.cap, again.cap)
        way = self.world.run(_started(look_up(self.grid, self.directory.cap, (*path, "d"))))
        self.assertEqual([child.name for child in way], ["", *path])
        self.world.run(made.link("f", A))
        below = look_up(self.grid, self.directory.cap, (*path, "f", "x"))
        self.failureOf(_started(below), NoSuchChild)


def _started(work: Any) -> Any:
    from twisted.internet.defer import Deferred

    return Deferred.fromCoroutine(work)
