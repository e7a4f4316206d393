"""How many bytes may pass."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transport.throttle import TokenBucket


class TokenBucketTests(SynchronousTestCase):
    """One direction of a line."""

    def test_the_rate(self) -> None:
        """Whoever waits as told gets the rate, and the burst once, whatever the pieces."""
        random = Random(1)
        bucket, now_s, passed = TokenBucket(1000, 100), 50.0, 0
        while passed < 100_000:
            now_s += bucket.wait_s(now_s)
            size = random.randrange(1, 400)
            bucket.take(now_s, size)
            passed += size
        self.assertLess(abs((now_s - 50.0) - (passed - 100) / 1000), 0.5)

    def test_what_was_not_used(self) -> None:
        """It is saved up to the burst, and no further."""
        bucket = TokenBucket(1000, 100)
        bucket.take(0.0, 100)
        self.assertGreater(bucket.wait_s(0.0), 0)
        self.assertEqual(bucket.wait_s(3600.0), 0)
        bucket.take(3600.0, 150)
        self.assertAlmostEqual(bucket.wait_s(3600.0), 0.051)

    def test_a_clock_that_jumps(self) -> None:
        """Back or ahead: no wait is longer than what is owed, and nothing passes beyond the burst."""
        bucket = TokenBucket(1000, 100)
        bucket.take(1e9, 600)
        self.assertAlmostEqual(bucket.wait_s(0.0), 0.501)
        self.assertAlmostEqual(bucket.wait_s(0.25), 0.251)
        bucket.take(1e12, 0)
        bucket.take(1e12, 100)
        self.assertLess(bucket.wait_s(1e12), 0.01)
        self.assertGreater(bucket.wait_s(1e12), 0)

    def test_another_rate(self) -> None:
        """It holds from now on; what passed before delays the next bytes by no more than the burst."""
        bucket = TokenBucket(1000, 100)
        bucket.take(0.0, 5000)
        self.assertAlmostEqual(bucket.wait_s(0.0), 4.901)
        bucket.change(0.0, 10_000)
        self.assertAlmostEqual(bucket.wait_s(0.0), 0.0101)
        bucket.change(1.0, None)
        bucket.take(1.0, 10**9)
        self.assertEqual(bucket.wait_s(1.0), 0)
        bucket.change(2.0, 1000)
        bucket.take(2.0, 200)
        self.assertAlmostEqual(bucket.wait_s(2.0), 0.101)
