"""Shares that are made in one go are those of the encoder, byte for byte."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import encoder, layout
from pipegrid.core.caps import ChkCap
from pipegrid.core.encoder import Encoder
from pipegrid.core.encoding_parameters import Geometry, Params


def encoded(geometry: Geometry, key: bytes, plaintext: bytes) -> tuple[list[bytes], ChkCap]:
    """Return what the encoder makes of a file of one segment."""
    encoder = Encoder(geometry, key)
    blocks = encoder.add(encoder.code(encoder.encrypt(plaintext)))
    trailers = encoder.finish()
    shares = [
        b"".join([*block.pieces, *trailer.pieces])
        for block, trailer in zip(blocks, trailers, strict=True)
    ]
    return shares, encoder.cap


class WholeSharesTests(SynchronousTestCase):
    """Against ``Encoder``, whose own tests hold it against shares of others."""

    def test_the_same_as_the_encoder(self) -> None:
        """All parameters that differ in kind, and lengths about multiples of k and of the cipher's block."""
        random = Random(5)
        for k, n in ((3, 10), (1, 1), (1, 5), (2, 3), (3, 3), (7, 20), (25, 100), (256, 256)):
            for size in (1, 16, 56, 57, 200, 999, 1000, 1001, 40_000):
                with self.subTest(k=k, n=n, size=size):
                    geometry = Params(k, n).geometry(size)
                    key, plaintext = random.randbytes(16), random.randbytes(size)
                    shares, cap = encoder.encode_whole(geometry, key, plaintext)
                    self.assertEqual((shares, cap), encoded(geometry, key, plaintext))
                    self.assertEqual(
                        {len(share) for share in shares}, {layout.share_bytes(geometry)}
                    )

    def test_what_fits(self) -> None:
        """One segment, and blocks of one stripe."""
        self.assertTrue(encoder.is_single_segment(Params(3, 10).geometry(300_000)))
        self.assertFalse(encoder.is_single_segment(Params(3, 10).geometry(500_000)))
        self.assertFalse(encoder.is_single_segment(Params(3, 10, 1000).geometry(1003)))
