"""Edits of a directory that had taken effect before are found there, and not made twice."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import LitCap
from pipegrid.core.mutable.directory_content_edits import (
    Edit,
    Link,
    Rename,
    Unlink,
    apply_edits,
    content_if_applied,
    merge_directories,
    pack_entries,
    unpack_entries,
)
from pipegrid.errors import DirectoryError, NoSuchChild

A, B, C, D = (LitCap(text) for text in (b"a", b"b", b"c", b"d"))
W = bytes(16)


def directory(now: float = 1.0, **children: LitCap) -> bytes:
    """Return one with these children."""
    return apply_edits(b"", [Link(name, cap) for name, cap in children.items()], W, now)


def listing(data: bytes | None) -> dict[str, object]:
    """Return what is in it."""
    assert data is not None
    return {name: entry.read_cap for name, entry in unpack_entries(data).items()}


class MadeBeforeTests(SynchronousTestCase):
    """Content that an edit was applied to, what became of it, and what somebody else has made of that."""

    before = directory(a=A, b=B)

    def attempt(
        self, edits: Sequence[Edit], *others: Edit, before: bytes | None = None
    ) -> dict[str, object] | None:
        """Return what is there when edits were stored, others came, and the edits are looked for."""
        before = self.before if before is None else before
        after = apply_edits(before, edits, W, 2.0)
        made = content_if_applied(before, after, apply_edits(after, others, W, 3.0))
        return None if made is None else listing(made)

    def test_names_that_pass_a_child_on(self) -> None:
        """They would take what they have made themselves, were they applied again."""
        exchanged: list[Edit] = [Rename("a", "x"), Rename("b", "a"), Rename("x", "b")]
        self.assertEqual(self.attempt(exchanged), {"a": B, "b": A})
        replaced: list[Edit] = [Rename("a", "b"), Link("a", C, replace=False)]
        self.assertEqual(self.attempt(replaced), {"a": C, "b": A})
        twice = [Rename("a", "b"), Rename("b", "c")]
        self.assertEqual(self.attempt(twice), {"c": A})

    def test_what_others_made_of_it_stays(self) -> None:
        """A child linked where one was taken out, one replaced, one taken out."""
        moved = [Rename("a", "z")]
        self.assertEqual(self.attempt(moved, Link("a", C)), {"a": C, "b": B, "z": A})
        both = [Link("x", C), Link("y", D)]
        self.assertEqual(self.attempt(both, Link("x", A)), {"a": A, "b": B, "x": A, "y": D})
        self.assertEqual(self.attempt(both, Unlink("x")), {"a": A, "b": B, "y": D})

    def test_not_there(self) -> None:
        """Nothing says so: they are to be applied."""
        after = apply_edits(self.before, [Rename("a", "z")], W, 2.0)
        self.assertIsNone(content_if_applied(self.before, after, self.before))
        other = directory(5.0, z=A, b=B)  # the same child, linked by somebody else
        self.assertIsNone(content_if_applied(self.before, after, other))
        self.assertIsNone(self.attempt([Unlink("a")]))
        self.assertIsNone(self.attempt([]))
        self.assertIsNone(self.attempt([Rename("a", "z")], Link("z", D)))

    def test_merged(self) -> None:
        """What came back when two versions were made one goes again."""
        after = apply_edits(self.before, [Rename("a", "z"), Link("b", C)], W, 2.0)
        theirs = apply_edits(self.before, [Link("new", D)], W, 2.0)
        merged = merge_directories(after, theirs)
        self.assertIn("a", listing(merged))
        made = content_if_applied(self.before, after, merged)
        self.assertEqual(listing(made), {"b": C, "new": D, "z": A})
        # Theirs has the later time, since a clock is wrong; it is older all the same.
        late = directory(9.0, a=A, b=B)
        after = apply_edits(late, [Rename("a", "z"), Link("b", C)], W, 2.0)
        self.assertEqual(listing(merge_directories(after, late)), {"a": A, "b": C, "z": A})
        # As writers merge it that keep their own clock's time.
        merged = pack_entries({**unpack_entries(late), "z": unpack_entries(after)["z"]})
        self.assertEqual(listing(merged), {"a": A, "b": B, "z": A})
        self.assertEqual(listing(content_if_applied(late, after, merged)), {"b": C, "z": A})

    def test_no_directory(self) -> None:
        """Of what is stored instead nothing is made."""
        self.assertRaises(DirectoryError, content_if_applied, self.before, self.before, b"x")

    def test_passed_on_and_gone(self) -> None:
        """A renamed child that a later edit took away is no error when all are applied again."""
        edits: list[Edit] = [Rename("a", "x"), Unlink("x")]
        after = apply_edits(self.before, edits, W, 2.0)
        self.assertEqual(apply_edits(after, edits, W, 3.0, repeated=True), after)
        others: list[list[Edit]] = [
            [Rename("a", "x")],
            [Rename("a", "x"), Link("y", C), Unlink("y")],
        ]
        for wrong in others:
            with self.assertRaises(NoSuchChild):
                apply_edits(after, wrong, W, 3.0, repeated=True)
        with self.assertRaises(NoSuchChild):
            apply_edits(after, edits, W, 3.0)
