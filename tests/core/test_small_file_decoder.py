"""Files of one segment that are decoded from whole shares."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import encoder
from pipegrid.core.caps import ChkCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.segment_decoding import (
    SMALL_FILE_BYTES,
    Unexpected,
    WholeShareForm,
    decode_whole,
    whole_share_form,
)
from tests.core.simple_encoder import encode


class SmallFileDecoderTests(SynchronousTestCase):
    """Right bytes from good shares, and nothing from others."""

    def form(self, cap: ChkCap) -> WholeShareForm:
        form = whole_share_form(cap)
        assert form is not None
        return form

    def test_any_shares(self) -> None:
        """Any k shares of what the encoder makes, of all kinds of sizes."""
        seed = Random().randrange(1 << 32)
        random = Random(seed)
        for k, n in ((3, 10), (1, 1), (1, 5), (2, 3), (3, 3), (7, 20), (25, 100), (256, 256)):
            for size in (1, 16, 56, 999, 1000, 1001, 40_000, SMALL_FILE_BYTES):
                with self.subTest(k=k, n=n, size=size, seed=seed):
                    plaintext = random.randbytes(size)
                    shares, cap = encoder.encode_whole(
                        Params(k, n).geometry(size), random.randbytes(16), plaintext
                    )
                    chosen = {number: shares[number] for number in random.sample(range(n), k)}
                    self.assertEqual(decode_whole(cap, self.form(cap), chosen), plaintext)

    def test_shares_of_another_encoder(self) -> None:
        """An encoder that shares no code with this program."""
        data = bytes(range(256)) * 5
        made = encode(data, max_segment_bytes=1 << 17)
        shares = {number: made.shares[number] for number in (1, 4, 8)}
        self.assertEqual(decode_whole(made.cap, self.form(made.cap), shares), data)

    def test_each_byte(self) -> None:
        """Wherever a bit is wrong, nothing comes, or what is right: from the bytes that nobody reads."""
        random = Random(7)
        plaintext = random.randbytes(120)
        for k, n, numbers in ((2, 3, (0, 2)), (3, 5, (0, 1, 2)), (3, 5, (4, 3, 1))):
            geometry = Params(k, n).geometry(len(plaintext))
            shares, cap = encoder.encode_whole(geometry, random.randbytes(16), plaintext)
            form = self.form(cap)
            unread = range(form.where.unused, form.where.crypttext_hash_tree)
            for number in numbers:
                for at in range(form.share_bytes):
                    damaged = bytearray(shares[number])
                    damaged[at] ^= 1 << random.randrange(8)
                    chosen = {each: shares[each] for each in numbers} | {number: bytes(damaged)}
                    if at in unread:
                        self.assertEqual(decode_whole(cap, form, chosen), plaintext)
                    else:
                        with self.assertRaises(Unexpected):
                            decode_whole(cap, form, chosen)

    def test_other_lengths_and_shares(self) -> None:
        """Shares that are cut off, too long, empty, of another number or of another file."""
        random = Random(8)
        plaintext = random.randbytes(500)
        geometry = Params(2, 4).geometry(500)
        shares, cap = encoder.encode_whole(geometry, b"k" * 16, plaintext)
        others, _ = encoder.encode_whole(geometry, b"l" * 16, plaintext)
        form = self.form(cap)
        for wrong in (b"", shares[0][:-1], shares[0] + b"\0", shares[2], others[0], shares[0][:40]):
            for order in ((0, 1), (1, 0)):
                chosen = {number: {0: wrong, 1: shares[1]}[number] for number in order}
                with self.assertRaises(Unexpected):
                    decode_whole(cap, form, chosen)
        self.assertEqual(decode_whole(cap, form, {1: shares[1], 3: shares[3]}), plaintext)

    def test_other_keys_and_sizes(self) -> None:
        """A cap with a wrong number or hash gets nothing."""
        shares, cap = encoder.encode_whole(Params(2, 4).geometry(500), b"k" * 16, bytes(500))
        for other in (
            ChkCap(cap.key, cap.ueb_hash, 2, 4, 499),
            ChkCap(cap.key, cap.ueb_hash, 2, 5, 500),
            ChkCap(cap.key, cap.ueb_hash, 1, 4, 500),
            ChkCap(cap.key, bytes(32), 2, 4, 500),
        ):
            with self.assertRaises(Unexpected):
                decode_whole(other, self.form(other), {0: shares[0], 1: shares[1]})

    def test_large_files(self) -> None:
        """What no writer's default puts into one segment is left to ``Decoder``."""
        for size, fits in (
            (SMALL_FILE_BYTES, True),
            (SMALL_FILE_BYTES + 1, False),
            (1 << 40, False),
        ):
            cap = ChkCap(bytes(16), bytes(32), 3, 10, size)
            self.assertEqual(whole_share_form(cap) is not None, fits)
