"""Versions: what they are told by, their order, and which one is taken."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.mutable.versions import (
    MAX_MUTABLE_BYTES,
    MAX_SEQUENCE_NUMBER,
    SIGNED_BYTES,
    Format,
    Holding,
    MutableGeometry,
    Version,
    checkstring_order,
    choose,
    next_sequence_number,
    parse_version,
)
from pipegrid.errors import UsageError
from tests import vectors
from tests.core.mutable.support import recorded_shares

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)


def version(
    number: int, root: int = 0, salt: int = 0, k: int = 2, n: int = 4, size: int = 10
) -> Version:
    """Return some version of SDMF."""
    segment = MutableGeometry(Format.SDMF, size, k, n).segment_bytes
    return Version(Format.SDMF, number, bytes([root]) * 32, bytes([salt]) * 16, k, n, segment, size)


class VersionTests(SynchronousTestCase):
    """What a share begins with."""

    def test_recorded_versions(self) -> None:
        """The recorded shares' prefixes are parsed, and packed again."""
        for case in vectors.load("mutable")["cases"]:
            for share in recorded_shares(case).values():
                parsed = parse_version(share)
                assert parsed is not None
                self.assertEqual(parsed.signed_prefix, share[: SIGNED_BYTES[parsed.format]])
                self.assertEqual(
                    (parsed.required_shares, parsed.total_shares), (case["k"], case["n"])
                )
                self.assertEqual(parsed.size, len(vectors.plaintext(case["plaintext"])))
                self.assertEqual(
                    checkstring_order(share[: {"sdmf": 57, "mdmf": 41}[case["format"]]]),
                    (parsed.sequence_number, parsed.root_hash),
                )

    def test_too_few_bytes(self) -> None:
        """A prefix that is cut off anywhere is not known yet, rather than wrong."""
        for prefix in (
            version(3).signed_prefix,
            b"\1" + bytes(40) + b"\1\1" + (131072).to_bytes(8, "big"),
        ):
            for length in range(len(prefix)):
                if prefix[:1] == b"\1" or length < 75:
                    self.assertIsNone(parse_version(prefix[:length]))
        self.assertIsNone(checkstring_order(bytes(40)))

    def test_refuses_what_cannot_be(self) -> None:
        """Counts, sizes and formats that no version has are refused, whatever they would cost."""
        good = bytearray(version(1).signed_prefix)
        for at, value in (
            (0, b"\2"),
            (0, b"\xff"),
            (57, b"\0"),
            (57, b"\5"),
            (58, b"\0"),
            (59, (11).to_bytes(8, "big")),
            (59, (12).to_bytes(8, "big")),
            (59, (1 << 63).to_bytes(8, "big")),
            (67, (1 << 63).to_bytes(8, "big")),
            (67, b"\xff" * 8),
        ):
            bad = good.copy()
            bad[at : at + len(value)] = value
            error = self.assertRaises(ValueError, parse_version, bytes(bad))
            self.assertNotIn("\n", str(error))
        mdmf = b"\1" + (1).to_bytes(8, "big") + bytes(32) + b"\2\3"
        for segment, size in ((0, 5), (3, 5), (1 << 62, 5), (1 << 25, 5), (4, 1 << 61), (0, 0)):
            prefix = mdmf + segment.to_bytes(8, "big") + size.to_bytes(8, "big")
            self.assertRaises(ValueError, parse_version, prefix)

    def test_huge_sizes_cost_nothing(self) -> None:
        """A file of 2^60 bytes in the smallest segments is arithmetic only; so are smaller ones, refused."""
        prefix = b"\1" + bytes(8) + bytes(32) + b"\1\1"
        size = MAX_MUTABLE_BYTES.to_bytes(8, "big")
        parsed = parse_version(prefix + (1 << 12).to_bytes(8, "big") + size)
        assert parsed is not None
        self.assertEqual(parsed.geometry.num_segments, 1 << 48)
        self.assertEqual(parsed.geometry.data_bytes, 4112 << 48)
        for segment_bytes in (1, 4095):
            with self.assertRaises(ValueError) as caught:
                parse_version(prefix + segment_bytes.to_bytes(8, "big") + size)
            self.assertIn(f"segments of {segment_bytes}, and", str(caught.exception))

    def test_order(self) -> None:
        """The sequence number decides, then the root hash, then the rest of what is signed."""
        ordered = [
            version(1, 9),
            version(2, 1, 9),
            version(2, 2, 1),
            version(2, 2, 2),
            version(255, 0),
            version(256, 0),
            version(MAX_SEQUENCE_NUMBER, 0),
        ]
        shuffled = ordered[:]
        random.Random(1).shuffle(shuffled)
        self.assertEqual(sorted(shuffled), ordered)
        self.assertLess(ordered[0], ordered[1])
        self.assertNotEqual(version(2, 2, 1), version(2, 2, 2))
        self.assertEqual(version(2, 2, 1), version(2, 2, 1))

    def test_next_number(self) -> None:
        """One above the highest seen; the last one cannot be followed, and says so."""
        self.assertEqual(next_sequence_number(0), 1)
        self.assertEqual(next_sequence_number(MAX_SEQUENCE_NUMBER - 1), MAX_SEQUENCE_NUMBER)
        self.assertRaises(UsageError, next_sequence_number, MAX_SEQUENCE_NUMBER)
        self.assertRaises(UsageError, version, MAX_SEQUENCE_NUMBER + 1)


class ChoiceTests(SynchronousTestCase):
    """Which version is taken."""

    def test_nothing(self) -> None:
        """Without shares there is no version, and any number is free."""
        choice = choose([])
        self.assertIsNone(choice.best)
        self.assertEqual(choice.highest_sequence_number, 0)
        self.assertFalse(choice.healthy())
        self.assertEqual((choice.rivals, choice.newer_unrecoverable), ((), ()))

    def test_highest_recoverable(self) -> None:
        """The highest version with k distinct shares is taken; a higher one with fewer is told of."""
        old, new = version(7), version(8)
        found = [Holding(server, server % 4, old) for server in range(8)]
        found += [Holding(8, 0, new), Holding(9, 0, new)]
        choice = choose(found)
        self.assertEqual(choice.best, old)
        self.assertEqual(choice.newer_unrecoverable, (new,))
        self.assertEqual(choice.highest_sequence_number, 8)
        self.assertEqual(choice.shares[old][1], (1, 5))
        self.assertFalse(choice.healthy())
        choice = choose([*found, Holding(9, 1, new)])
        self.assertEqual((choice.best, choice.recoverable), (new, (new, old)))
        self.assertEqual((choice.unrecoverable, choice.rivals), ((), ()))
        self.assertEqual(choice.missing_shares(new), {2, 3})

    def test_two_heads(self) -> None:
        """Two recoverable versions with one number: the higher root is taken, the other one is a rival."""
        a, b, c = version(3, 1), version(3, 2), version(2)
        found = [Holding(s, s, v) for v in (a, b, c) for s in range(2)]
        choice = choose(found)
        self.assertEqual((choice.best, choice.rivals), (b, (a,)))
        self.assertEqual(choice.recoverable, (b, a, c))

    def test_what_more_servers_have(self) -> None:
        """Of two with one number that on more servers is taken: only it can have been acknowledged."""
        few, many = version(3, 2), version(3, 1)
        found = [Holding(s, s, few) for s in (0, 1)] + [Holding(s, s, many) for s in (2, 3, 0)]
        found[-1] = Holding(4, 0, many)
        choice = choose(found)
        self.assertEqual((choice.best, choice.rivals), (many, (few,)))
        # Copies on one server are no more than one.
        found = [Holding(0, s, few) for s in range(4)] + [Holding(s, s, many) for s in (2, 3)]
        self.assertEqual(choose(found).best, many)

    def test_healthy(self) -> None:
        """One version with all its shares is healthy; a share less, or another version, is not."""
        all_shares = [Holding("s", number, version(1)) for number in range(4)]
        self.assertTrue(choose(all_shares).healthy())
        self.assertFalse(choose(all_shares[1:]).healthy())
        self.assertFalse(choose([*all_shares, Holding("t", 0, version(2))]).healthy())

    def test_share_numbers_that_cannot_be(self) -> None:
        """A server that claims a share number beyond n makes nothing recoverable."""
        choice = choose([Holding("s", 0, version(1)), Holding("s", 200, version(1))])
        self.assertIsNone(choice.best)

    @EXAMPLES
    @given(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)),
            max_size=30,
        ),
        st.randoms(use_true_random=False),
    )
    def test_order_of_answers_does_not_matter(
        self, facts: list[tuple[int, int, int, int]], rng: random.Random
    ) -> None:
        """Whatever order servers answer in, the same version is taken, and it is recoverable."""
        found = [Holding(s, j, version(number, root)) for s, j, number, root in facts]
        choice = choose(found)
        rng.shuffle(found)
        again = choose(found)
        self.assertEqual(choice.best, again.best)
        self.assertEqual(choice.recoverable, again.recoverable)
        self.assertEqual(choice.unrecoverable, again.unrecoverable)
        for each in choice.recoverable:
            self.assertGreaterEqual(len({h.share_number for h in found if h.version == each}), 2)
            best = choice.best
            assert best is not None
            self.assertLessEqual(each.sequence_number, best.sequence_number)
            self.assertEqual(
                each in choice.rivals,
                each != best and each.sequence_number == best.sequence_number,
            )
