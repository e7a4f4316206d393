"""What a verifier finds in one share."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.share_verifier import MAX_PROBLEMS, ShareVerifier
from pipegrid.errors import CorruptionError
from tests.core.simple_encoder import Encoded, encode
from tests.core.test_decoder import content, flip

FILES = [
    encode(content(1000, "verify"), 2, 5, 202),
    encode(content(300, "verify"), 3, 3, 1 << 20),
    encode(content(700, "verify"), 1, 2, 100, version=2),
]


def verify(
    cap: ChkCap | ChkVerifierCap, number: int, share: bytes, step: int = 1 << 20
) -> list[CorruptionError]:
    """Return what a verifier finds."""
    verifier = ShareVerifier(cap, number)
    for at in range(0, len(share), step):
        verifier.feed(share[at : at + step])
    return verifier.finish()


class ShareVerifierTests(SynchronousTestCase):
    """Good shares, and every kind of bad ones."""

    def test_good_shares_have_no_problems(self) -> None:
        """Whatever the split, with either cap, in either layout, wherever the sections are."""
        foreign = encode(content(1000, "verify"), 2, 5, 202, gap=100)
        for encoded in (*FILES, foreign):
            for number, share in enumerate(encoded.shares):
                for step in (1, 33, 1000, 1 << 20):
                    self.assertEqual(verify(encoded.cap.verifier(), number, share, step), [])
                self.assertEqual(verify(encoded.cap, number, share), [])
                self.assertEqual(verify(encoded.cap, number, share + b"behind the end"), [])

    @settings(max_examples=500, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def test_every_flipped_bit_is_found(self, data: st.DataObject) -> None:
        """A flipped bit is named, unless it is in the unused area or an ignored header field."""
        encoded = data.draw(st.sampled_from(FILES))
        number = data.draw(st.integers(0, len(encoded.shares) - 1))
        section = data.draw(st.sampled_from(encoded.sections))
        offset = data.draw(st.integers(section.start, section.end - 1))
        share = flip(encoded.shares[number], offset, data.draw(st.integers(0, 7)))
        problems = verify(encoded.cap.verifier(), number, share)
        if section.name == "unused":
            self.assertEqual(problems, [])
        elif not is_ignored(encoded, offset):
            self.assertNotEqual(problems, [], f"byte {offset} of {section}")
            names = set()
            for error in problems:
                self.assertEqual(error.share_number, number)
                assert error.offset is not None
                names.add(encoded.section(error.offset).name)
            self.assertIn(section.name, names)
            if section.name != "header":
                self.assertEqual(names, {section.name}, str(problems))

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def test_every_truncation_is_found(self, data: st.DataObject) -> None:
        """A share that lacks its end has problems."""
        encoded = data.draw(st.sampled_from(FILES))
        keep = data.draw(st.integers(0, len(encoded.shares[0]) - 1))
        self.assertNotEqual(verify(encoded.cap, 0, encoded.shares[0][:keep], 50), [])

    def test_every_bad_block_is_named(self) -> None:
        """Each problem has its own offset."""
        share = FILES[0].shares[1]
        for segment in (0, 3, 4):
            share = flip(share, 36 + 101 * segment + 50)
        problems = verify(FILES[0].cap, 1, share)
        self.assertEqual([e.offset for e in problems], [36, 36 + 303, 36 + 404])

    def test_swapped_and_foreign_shares_are_found(self) -> None:
        """A good share under another number, or of another file, is not good."""
        self.assertNotEqual(verify(FILES[0].cap, 0, FILES[0].shares[1]), [])
        other = encode(content(1000, "other"), 2, 5, 202)
        self.assertNotEqual(verify(FILES[0].cap, 0, other.shares[0]), [])

    def test_noise_is_found(self) -> None:
        """Random bytes have problems and cause no other errors."""
        chooser = random.Random(3)
        for version in (b"", b"\0\0\0\1", b"\0\0\0\2"):
            for length in (0, 10, 64, 70, 3000):
                noise = version + chooser.randbytes(length)
                self.assertNotEqual(verify(FILES[0].cap, 0, noise, 99), [])

    def test_a_ueb_that_disagrees_with_the_cap_is_named(self) -> None:
        """The cap's numbers count; a UEB that says otherwise is a problem with its keys named."""
        encoded = encode(content(1000), 2, 5, 202, replace_ueb={b"needed_shares": b"3"})
        (problem,) = verify(encoded.cap, 0, encoded.shares[0])
        self.assertIn("needed_shares", str(problem))
        self.assertEqual(problem.offset, encoded.sections[-1].start)

    def test_the_segment_size_may_be_told(self) -> None:
        """A header without a block size can be verified by who knows the segment size."""
        share = bytearray(FILES[0].shares[0])
        share[4:8] = bytes(4)
        verifier = ShareVerifier(FILES[0].cap, 0, segment_bytes=202)
        verifier.feed(share)
        self.assertEqual(verifier.finish(), [])

    def test_problems_are_bounded(self) -> None:
        """A share that is wrong everywhere does not list every block."""
        encoded = encode(content(2000), 1, 1, 10)
        share = encoded.shares[0][:36] + bytes(2000) + encoded.shares[0][2036:]
        problems = verify(encoded.cap, 0, share)
        self.assertEqual(len(problems), MAX_PROBLEMS + 1)
        self.assertIn("100 more", str(problems[-1]))


def is_ignored(encoded: Encoded, offset: int) -> bool:
    """Say whether a byte of the header means nothing to readers."""
    width = 4 if encoded.sections[0].end == 36 else 8
    field = (offset - 4) // width if offset >= 4 else -1
    return encoded.section(offset).name == "header" and field in (0, 1, 3)
