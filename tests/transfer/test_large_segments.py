"""A file whose segments are too large to be held: nothing of it is fetched, unless that is allowed."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.error_report import ExitStatus, sentence, status_of
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.share_verifier import ShareVerifier
from pipegrid.errors import SegmentTooLarge
from pipegrid.transfer.settings import DownloadSettings
from tests.transfer.world import World, content

SIZE = 8_000_000
SEGMENT_BYTES = 6_000_000
ALLOWED_BYTES = 2_000_000


class LargeSegmentTests(SynchronousTestCase):
    """With a bound of 2 MB, and segments of 6."""

    def make(self, allowed_bytes: int) -> None:
        settings = DownloadSettings(max_segment_bytes=allowed_bytes)
        self.world = World(params=Params(3, 10, SEGMENT_BYTES), download=settings)
        self.file = self.world.plant(self.world.encoded(content(SIZE)))

    def refused(self, started: Deferred[Any]) -> None:
        with self.assertRaises(SegmentTooLarge) as caught:
            self.world.run(started)
        self.assertEqual(caught.exception.segment_bytes, SEGMENT_BYTES)
        self.assertIn("allow more with max_segment_bytes = 6MiB", str(caught.exception))
        self.assertIn("allow more with --max-segment 6MiB", sentence(caught.exception))
        self.assertEqual(status_of(caught.exception), ExitStatus.USAGE)
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_get(self) -> None:
        """Refused as soon as the UEB is known; what was asked for before that is bounded."""
        self.make(ALLOWED_BYTES)
        self.refused(self.world.grid.get(self.file.cap, BytesIO()))
        fetched = sum(line.delivered_bytes for line in self.world.lines)
        self.assertLess(fetched, SIZE + 1_000_000)
        path = self.mktemp()
        self.refused(self.world.grid.get(self.file.cap, path))

    def test_repair(self) -> None:
        """Refused before room for a share is asked for; but a healthy file's leases are renewed."""
        self.make(ALLOWED_BYTES)
        self.assertTrue(self.world.run(self.world.grid.repair(self.file.cap)).whole)
        self.world.ring(self.file)[0].storage.shares.clear()
        self.refused(self.world.grid.repair(self.file.cap))
        self.assertEqual(sum(line.count("allocate") for line in self.world.lines), 0)

    def test_checks(self) -> None:
        """They hold no segment, and so they have no bound: blocks are hashed as they pass."""
        self.make(ALLOWED_BYTES)
        self.assertTrue(self.world.run(self.world.grid.check(self.file.cap)).healthy)
        self.assertTrue(self.world.run(self.world.grid.check(self.file.cap, verify=True)).healthy)
        verifier = ShareVerifier(self.file.cap, 0)
        share = self.file.shares[0]
        for at in range(0, len(share), 10_000):
            verifier.feed(share[at : at + 10_000])
            held = sum(len(section.data) for section in verifier._sections.values())
            self.assertLess(held, 10_000)
        self.assertEqual(verifier.finish(), [])

    def test_what_is_allowed(self) -> None:
        """A file that is one segment is as large as itself only."""
        self.make(SEGMENT_BYTES)
        self.assertEqual(self.world.fetch(self.file.cap), content(SIZE))
        self.world.ring(self.file)[0].storage.shares.clear()
        self.assertTrue(self.world.run(self.world.grid.repair(self.file.cap)).whole)
