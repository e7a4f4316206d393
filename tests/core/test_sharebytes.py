"""A share's bytes: kept once, only if asked, in any split and order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.received_share import ShareBytes

SHARE = bytes(range(256)) * 80
places = st.integers(0, len(SHARE))


def span(start: int, end: int) -> int:
    """Return the bytes of a range as a set, which is a number: the bit of each is 1."""
    return (1 << end) - (1 << start) if start < end else 0


class ShareBytesTests(SynchronousTestCase):
    """What is kept, and what is not."""

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.tuples(places, places), max_size=6),
        st.lists(st.tuples(places, places), max_size=12),
        st.tuples(places, places),
    )
    def test_only_asked_bytes_are_kept(
        self, asked: list[tuple[int, int]], came: list[tuple[int, int]], released: tuple[int, int]
    ) -> None:
        """Whatever comes, what is held is what was asked, came, and was not released."""
        store = ShareBytes()
        want = here = 0
        for a, b in asked:
            store.ask(a, b)
            want |= span(a, b)
        half = len(came) // 2
        for a, b in came[:half]:
            store.put(a, SHARE[a:b])
        store.release(*released)
        for a, b in came[half:]:
            store.put(a, SHARE[a:b])
        for a, b in came:
            here |= span(a, b)
        here &= want & ~span(*released)
        self.assertEqual(store.held_bytes, here.bit_count())
        for a, b in asked:
            if a < b and store.has(a, b):
                self.assertEqual(store.read(a, b), SHARE[a:b])
            self.assertEqual(store.has(a, b), not span(a, b) & ~here)

    def test_no_bytes(self) -> None:
        """Nothing, put in the middle of what is under way, leaves nothing that would be read."""
        store = ShareBytes()
        store.ask(0, 8000)
        store.put(4096, b"")
        store.put(0, SHARE[:5000])
        store.put(5000, SHARE[5000:8000])
        self.assertEqual(store.read(0, 8000), SHARE[:8000])

    def test_nothing_is_asked_twice(self) -> None:
        """Asking again returns only what is new, until the connection is lost."""
        store = ShareBytes()
        self.assertEqual(store.ask(0, 10), [(0, 10)])
        self.assertEqual(store.ask(5, 20), [(10, 20)])
        store.put(0, SHARE[:5])
        store.forget_asked()
        self.assertEqual(store.ask(0, 20), [(5, 20)])

    def test_large_pieces_are_not_copied(self) -> None:
        """A large buffer comes back as a view of itself."""
        store = ShareBytes()
        store.ask(0, len(SHARE))
        store.put(0, SHARE)
        (piece,) = store.pieces(100, 10_000)
        self.assertIs(piece.obj, SHARE)

    def test_tiny_pieces_are_gathered(self) -> None:
        """Bytes that come one at a time do not become objects of their own."""
        store = ShareBytes()
        store.ask(0, len(SHARE))
        for i in range(len(SHARE)):
            store.put(i, SHARE[i : i + 1])
        self.assertEqual(len(store.pieces(0, len(SHARE))), 1)
        self.assertEqual(store.read(0, len(SHARE)), SHARE)

    def test_a_piece_that_is_read_may_not_move(self) -> None:
        """While a job looks at gathered bytes, more can come."""
        store = ShareBytes()
        store.ask(0, 100)
        store.put(0, SHARE[:10])
        looking = store.pieces(0, 10)
        store.put(10, SHARE[10:20])
        self.assertEqual(bytes(looking[0]), SHARE[:10])
        self.assertEqual(store.read(0, 20), SHARE[:20])
