"""Walks meet everything once and in order, read far ahead within bounds, and go on behind what is broken."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, parse_cap
from pipegrid.errors import CapError, DirectoryError, NotEnoughSharesError
from pipegrid.tree.directory_reading import ListingLimits
from pipegrid.tree.walk import (
    Found,
    Met,
    TreeStats,
    Unreadable,
    Walk,
    WalkLimits,
    identity_of,
    walk,
)
from pipegrid.tree.walk_order import WalkOrder
from tests.tree.support import FakeGrid, changing_cap, entry_bytes

BIG = b"x" * 100


def collect(tree: Walk) -> tuple[list[Met], Deferred[None]]:
    """Walk to the end; return what is met so far, and what fires then."""
    met: list[Met] = []

    async def run() -> None:
        async for each in tree:
            met.append(each)  # noqa: PERF401 - what came before an error counts

    return met, Deferred.fromCoroutine(run())


def chain(grid: FakeGrid, depth: int, inner: dict[str, Any]) -> DirectoryCap:
    """Return a directory with so many levels below it, each of which says so in a file of its own."""
    tree: dict[str, Any] = {**inner, f"file {depth}": BIG + str(depth).encode()}
    for level in reversed(range(depth)):
        tree = {"down": tree, f"file {level}": BIG + str(level).encode()}
    return grid.directory(tree)


class WalkTests(SynchronousTestCase):
    """A tree as its consumer sees it."""

    def setUp(self) -> None:
        self.grid = FakeGrid()

    def walked(self, cap: Cap, **options: Any) -> list[Met]:
        """Return all that is met."""
        met, done = collect(walk(self.grid, cap, **options))
        self.successResultOf(done)
        return met

    def names(self, cap: Cap, **options: Any) -> list[str]:
        """Return paths of what is met, with a ! for what cannot be read, and a * for what was met before."""
        return [
            "/".join(met.path) + ("!" if isinstance(met, Unreadable) else "*" if met.again else "")
            for met in self.walked(cap, **options)
        ]

    def test_directories_come_before_their_children_in_order(self) -> None:
        """What is met comes depth first, names ascending, with kinds, metadata and sizes."""
        cap = self.grid.directory(
            {
                "b": {"z": b"", "a": (BIG, {"mtime": 1.5})},
                "a": b"short",
                "c": {},
                "d": parse_cap("imm.lafs://from_the_future"),
            }
        )
        self.assertEqual(self.names(cap), ["", "a", "b", "b/a", "b/z", "c", "d"])
        met = {each.path: each for each in self.walked(cap)}
        kinds = [each.kind for each in met.values() if isinstance(each, Found)]
        self.assertEqual(" ".join(kinds), "directory file directory file file directory unknown")
        self.assertEqual(met["b", "a"].metadata, {"mtime": 1.5})
        root = met[()]
        assert isinstance(root, Found)
        assert root.listing is not None
        self.assertEqual([entry.name for entry in root.listing.entries], ["a", "b", "c", "d"])

    def test_a_file_is_walked_alone(self) -> None:
        """A walk from the cap of a file meets that file, with what is known of it."""
        cap = self.grid.file(BIG)
        [met] = self.walked(cap, metadata_json=b'{"mtime": 2.5}')
        self.assertEqual((met.path, met.cap, met.metadata), ((), cap, {"mtime": 2.5}))
        self.assertRaises(CapError, walk, self.grid, "URI:CHK:rubbish")

    def test_a_level_costs_a_round_trip(self) -> None:
        """Of a hundred chains twenty deep, all directories of a level are read at once."""
        grid = self.grid
        top = {f"chain {n:02}": chain(grid, 19, {f"end {n}": BIG}) for n in range(50)}
        cap = grid.directory(top)
        grid.held = True
        met, done = collect(walk(grid, cap))
        rounds = 0
        while grid.release():
            rounds += 1
        self.successResultOf(done)
        self.assertEqual(len(met), 1 + 50 * (20 + 20 + 1))
        self.assertEqual(rounds, 21)

    def test_reading_ahead_is_bounded_in_number(self) -> None:
        """However many directories there are, so many are read at once."""
        cap = self.grid.directory({f"{n:03}": {"f": BIG, str(n): b""} for n in range(100)})
        self.grid.held = True
        met, done = collect(walk(self.grid, cap, limits=WalkLimits(reads=7)))
        while self.grid.release():
            pass
        self.successResultOf(done)
        self.assertIn(self.grid.most, (7, 8))  # the next one in order never waits
        self.assertEqual(len(met), 301)

    def test_reading_ahead_is_bounded_in_memory(self) -> None:
        """A consumer that takes its time finds little more in memory than it may; then all the rest."""
        cap = self.grid.directory({f"{n:03}": {"f": BIG, str(n): b""} for n in range(100)})
        order = WalkOrder(cap, WalkLimits(ahead_bytes=20_000))
        tree = Walk(self.grid, order, ListingLimits())
        most = 0
        count = 0

        async def run() -> None:
            nonlocal most, count
            async for _ in tree:
                most = max(most, order.held_bytes)
                count += 1

        self.successResultOf(Deferred.fromCoroutine(run()))
        self.assertEqual(count, 301)
        root_bytes = 100 * 1000 + 20_000
        self.assertLess(most, root_bytes + 20_000 + 3000)
        self.assertEqual(order.held_bytes, 0)

    def test_what_cannot_be_read_stops_nothing(self) -> None:
        """A lost directory and a damaged one come as errors in their places; their siblings are met."""
        lost = self.grid.directory({"f": BIG, "lost": b""})
        self.grid.broken.add(lost.file)
        damaged = self.grid.packed(b"7:nonsense" + BIG)
        cap = self.grid.directory({"a": lost, "b": damaged, "c": {"f": BIG}, "d": b""})
        self.assertEqual(self.names(cap), ["", "a!", "b!", "c", "c/f", "d"])
        errors = [met.error for met in self.walked(cap) if isinstance(met, Unreadable)]
        self.assertIsInstance(errors[0], NotEnoughSharesError)
        self.assertIsInstance(errors[1], DirectoryError)
        self.grid.broken.add(cap.file)
        self.assertEqual(self.names(cap), ["!"])

    def test_a_verifier_cap_lists_nothing(self) -> None:
        """The verifier cap of a directory is unreadable, with a sentence."""
        cap = self.grid.directory({"f": BIG, "g": BIG}).verifier()
        assert cap is not None
        [met] = self.walked(cap)
        assert isinstance(met, Unreadable)
        self.assertIn("verifier cap of a directory", str(met.error))

    def test_a_verifier_cap_hides_nothing(self) -> None:
        """A directory that is met by its verifier cap first is entered where a cap reads it, once."""
        cap = self.grid.directory({"f": BIG, "g": b"little"})
        verifier = cap.verifier()
        assert verifier is not None
        children: dict[str, Cap] = {
            "a": verifier,
            "b": cap,
            "c": cap,
            "d": verifier,
            "e": LitCap(b"e"),
        }
        root = self.grid.changing(1, children)
        self.assertEqual(self.names(root), ["", "a!", "b*", "b/f", "b/g", "c*", "d*", "e"])
        stats = TreeStats()
        for met in self.walked(root):
            stats.count(met)
        fields = stats.fields()
        self.assertEqual((fields["count-directories"], fields["count-files"]), (2, 3))
        assert isinstance(cap.file, ChkCap)
        self.assertGreaterEqual(fields["size-directories"], cap.file.size)

    def test_each_directory_is_entered_once(self) -> None:
        """The same directory elsewhere is met again, and not entered; neither is the same file new."""
        same = {"f": BIG, "g": b"little"}
        cap = self.grid.directory({"a": same, "b": same, "c": BIG})
        self.assertEqual(self.names(cap), ["", "a", "a/f", "a/g", "b*", "c*"])
        self.assertEqual(self.grid.reads, 2)

    def test_all_paths_are_entered_if_wanted(self) -> None:
        """Whoever restores a tree gets the same directory in each of its places."""
        same = {"f": BIG, "g": b"little"}
        cap = self.grid.directory({"a": same, "b": same})
        self.assertEqual(
            self.names(cap, all_paths=True), ["", "a", "a/f", "a/g", "b*", "b/f*", "b/g"]
        )

    def test_a_directory_that_contains_itself(self) -> None:
        """A loop is met, and left alone; what stands behind it is met."""
        first, second = changing_cap(1), changing_cap(2)
        self.grid.changing(1, {"down": second, "self": first})
        self.grid.changing(2, {"f": self.grid.file(BIG), "up": first})
        self.assertEqual(self.names(first), ["", "down", "down/f", "down/up*", "self*"])
        self.assertEqual(
            self.names(first, all_paths=True), ["", "down", "down/f", "down/up!", "self!"]
        )
        reads = self.grid.reads
        again = self.walked(first, all_paths=True)[-1]
        self.assertEqual(self.grid.reads - reads, 2)  # nor is it read again, ahead of the walk
        assert isinstance(again, Unreadable)
        self.assertIn("contains itself", str(again.error))

    def test_a_tree_with_a_billion_paths_ends(self) -> None:
        """Thirty directories, each twice in the one above: with all paths wanted, so many objects are met."""
        tree: Cap = self.grid.directory({"f": BIG, "g": BIG})
        for _ in range(30):
            tree = self.grid.directory({"a": tree, "b": tree})
        met = self.walked(tree, all_paths=True, limits=WalkLimits(objects=500))
        self.assertEqual(len(met), 501)
        last = met[-1]
        assert isinstance(last, Unreadable)
        self.assertIn("more than 500 objects", str(last.error))
        self.assertEqual(len(self.names(tree)), 1 + 2 * 30 + 2)

    def test_depth_is_bounded(self) -> None:
        """Below so many levels nothing is entered, and the rest is met."""
        cap = chain(self.grid, 10, {})
        names = self.names(cap, limits=WalkLimits(depth=3))
        self.assertEqual(
            names,
            [
                "",
                "down",
                "down/down",
                "down/down/down",
                "down/down/down/down!",
                "down/down/down/file 3",
                "down/down/file 2",
                "down/file 1",
                "file 0",
            ],
        )

    def test_a_thousand_levels(self) -> None:
        """A deep tree is walked to its end, and one that is dropped half way, too."""
        cap = chain(self.grid, 900, {})
        self.assertEqual(len(self.names(cap)), 901 + 901)
        twice = self.grid.directory({"a": cap, "b": cap, "f": BIG})
        self.assertEqual(len(self.names(twice)), 1 + 901 + 901 + 2)

    def test_what_lies_open_is_bounded(self) -> None:
        """Directories inside each other with many entries each: one too many is left out with a sentence."""
        inner: dict[str, Any] = {f"{n}": b"" for n in range(100)}
        for _ in range(5):
            inner = {"0 down": inner, **{f"{n}": b"" for n in range(100)}}
        cap = self.grid.directory(inner)
        met = self.walked(cap, limits=WalkLimits(open_bytes=350_000))
        [bad] = [each for each in met if isinstance(each, Unreadable)]
        self.assertEqual(bad.path, ("0 down",) * 3)
        self.assertIn("walk it by itself", str(bad.error))
        self.assertEqual(len(met), 1 + 3 * 101)

    def test_limits_of_a_directory(self) -> None:
        """Too many bytes, entries, or too long a name: unreadable, and a huge one is not even asked for."""
        cap = self.grid.directory({"d": {f"{n:03}": BIG for n in range(50)}, "f": b""})
        for limits in (
            ListingLimits(directory_bytes=1000),
            ListingLimits(entries=49),
            ListingLimits(name_bytes=2),
        ):
            self.assertEqual(self.names(cap, listing=limits), ["", "d!", "f"])
        huge = parse_cap(f"URI:DIR2-CHK:{'a' * 26}:{'a' * 52}:3:10:{1 << 60}")
        reads = self.grid.reads
        [met] = self.walked(huge)
        assert isinstance(met, Unreadable)
        self.assertIn("more than 64 MiB", str(met.error))
        self.assertEqual(self.grid.reads, reads)

    def test_a_directory_that_can_change_and_lies_about_its_size(self) -> None:
        """No more is fetched of it than it may have."""
        cap = self.grid.changing(1, {f"{n:03}": self.grid.file(BIG) for n in range(100)})
        [met] = self.walked(cap, listing=ListingLimits(directory_bytes=2000))
        self.assertIsInstance(met, Unreadable)

    def test_hostile_entries(self) -> None:
        """Any name is met as it is; nesting without end in metadata harms nobody."""
        lit = "URI:LIT:ifsgc"
        deep = b"[" * 100_000
        data = b"".join(
            [
                entry_bytes("", lit),
                entry_bytes("..", lit, metadata=deep),
                entry_bytes("a/b\0\x1b[2J", lit, metadata=b"[]"),
            ]
        )
        met = self.walked(self.grid.packed(data))
        self.assertEqual([each.path[-1] for each in met[1:]], ["", "..", "a/b\0\x1b[2J"])
        self.assertEqual([each.metadata for each in met[1:]], [{}, {}, {}])
        written = self.grid.packed(entry_bytes("n", lit, rw_data=b"secret") + entry_bytes("m", lit))
        self.assertEqual(self.names(written), ["!"])

    def test_identities(self) -> None:
        """Caps of one object have one identity, whatever they grant; hostile look-alikes have others."""
        cap = self.grid.directory({"f": BIG, "g": BIG})
        self.assertEqual(identity_of(cap), identity_of(cap.verifier()))
        other = parse_cap(str(cap).replace(":3:10:", ":4:10:"))
        self.assertNotEqual(identity_of(cap), identity_of(other))
        self.assertIsNone(identity_of(parse_cap("URI:LIT:ifsgc")))
        self.assertIsNone(identity_of(parse_cap("lafs://future")))

    def test_cancelling(self) -> None:
        """A cancelled consumer ends the walk and all reading for it."""
        cap = self.grid.directory({f"{n:03}": {"f": BIG, str(n): b""} for n in range(20)})
        self.grid.held = True
        tree = walk(self.grid, cap)
        _, done = collect(tree)
        self.grid.release()
        done.cancel()
        self.failureResultOf(done, CancelledError)
        self.assertTrue(self.grid.waiting)
        self.assertTrue(all(answer.called for _, answer in self.grid.waiting))

    def test_leaving_early(self) -> None:
        """Who has seen enough leaves nothing running."""
        cap = self.grid.directory({f"{n:03}": {"f": BIG, str(n): b""} for n in range(20)})

        async def first() -> Met:
            with walk(self.grid, cap) as tree:
                async for met in tree:
                    self.grid.held = True
                    return met
            raise AssertionError("nothing was met")

        self.assertEqual(self.successResultOf(Deferred.fromCoroutine(first())).path, ())
        self.assertTrue(all(answer.called for _, answer in self.grid.waiting))


names = st.sampled_from("abcdef")
trees = st.recursive(
    st.binary(max_size=80),
    lambda inner: st.dictionaries(names, inner, max_size=4),
    max_leaves=25,
)


class AnyTreeTests(SynchronousTestCase):
    """Whatever the tree, the limits, and the order of answers."""

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(
        st.dictionaries(names, trees, max_size=5),
        st.integers(1, 3),
        st.sampled_from([1, 5000, 1 << 20]),
        st.randoms(use_true_random=False),
    )
    def test_any_order_of_answers(
        self, tree: dict[str, Any], reads: int, ahead_bytes: int, random: Any
    ) -> None:
        """All paths are met, in the order of a walk that asks for one directory after the other."""
        grid = FakeGrid()
        cap = grid.directory(tree)
        expected: list[tuple[str, ...]] = []

        def visit(path: tuple[str, ...], inner: Any) -> None:
            expected.append(path)
            for name in sorted(inner) if isinstance(inner, dict) else ():
                visit((*path, name), inner[name])

        visit((), tree)
        grid.held = True
        limits = WalkLimits(reads=reads, ahead_bytes=ahead_bytes)
        met, done = collect(walk(grid, cap, all_paths=True, limits=limits))
        while grid.waiting:
            number = random.randrange(len(grid.waiting))
            grid.waiting.pop(number)[1].callback(None)
        self.successResultOf(done)
        self.assertEqual([each.path for each in met], expected)
