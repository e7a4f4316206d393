"""How large the messages are that a share goes in."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoder import ShareWrite
from pipegrid.transfer.put.write_batches import (
    BATCH_BYTES,
    MIN_BATCH_BYTES,
    UNKEPT_BATCH_BYTES,
    Batch,
)


class BatchTests(SynchronousTestCase):
    """Writes that go in one message."""

    def test_what_is_small_grows(self) -> None:
        """However small the window is: below the least size it is not even asked."""
        self.assertTrue(Batch(0, length=MIN_BATCH_BYTES - 1).is_small)
        self.assertFalse(Batch(0, length=MIN_BATCH_BYTES).is_small)

    def test_as_large_as_the_window_likes(self) -> None:
        """Between the least size and the largest."""
        for liked, full in (
            (-5, MIN_BATCH_BYTES),
            (1 << 20, 1 << 20),
            (100 << 20, BATCH_BYTES),
        ):
            self.assertFalse(Batch(0, length=full - 1).is_full(liked, 0, 0.5))
            self.assertTrue(Batch(0, length=full).is_full(liked, 0, 0.5))

    def test_the_second_one(self) -> None:
        """Is cut shorter, so that the shares of a file do not fill up together; never below the least."""
        self.assertTrue(Batch(0, length=1 << 20).is_full(4 << 20, 1, 0.25))
        self.assertFalse(Batch(0, length=1 << 20).is_full(4 << 20, 2, 0.25))
        self.assertFalse(Batch(0, length=MIN_BATCH_BYTES - 1).is_full(4 << 20, 1, 0.0))

    def test_large_ones_are_let_go(self) -> None:
        """What is smaller is kept, so that it need not be coded again."""
        self.assertFalse(Batch(0, length=UNKEPT_BATCH_BYTES - 1).may_be_released)
        self.assertTrue(Batch(0, length=UNKEPT_BATCH_BYTES).may_be_released)

    def test_its_last_byte(self) -> None:
        """Goes in a batch of its own, which completes the share."""
        batch = Batch(100)
        batch.add(ShareWrite(3, 100, (b"abc", b"d")), 4)
        batch.add(ShareWrite(3, 104, (b"trailer",)), None)
        last = batch.cut_last()
        self.assertEqual(b"".join(bytes(each) for each in batch.pieces), b"abcdtraile")
        self.assertEqual((batch.offset, batch.length, batch.segments), (100, 10, range(4, 5)))
        self.assertEqual((last.offset, last.length, last.has_trailer), (110, 1, True))
        self.assertEqual([bytes(each) for each in last.pieces], [b"r"])
