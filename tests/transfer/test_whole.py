"""
Small files that are sent in one move, and what becomes of those that do not end in it.

What happens to files that are sent in any other way has to happen to these as well: so those tests are run
again.
"""

from __future__ import annotations

import gc
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import encoder, layout
from pipegrid.core.encoding_parameters import Params
from pipegrid.reactor.deferreds import Deadlines
from pipegrid.testing.clock import HeapClock
from pipegrid.transfer.put.small_file_upload import SmallFileUpload
from pipegrid.transfer.put.upload_loop import Upload
from pipegrid.transfer.settings import UploadSettings
from pipegrid.transport.foolscap import client
from pipegrid.wire.foolscap_broker import can_pack
from tests.transfer import test_random, test_upload
from tests.transfer.world import RTT, Line, World

WHOLE_BYTES = 16 * 1024


class WholePlacementTests(test_upload.PlacementTests):
    """Refusals, lost and full servers, twins."""

    def setUp(self) -> None:
        self.patch(Line, "whole_bytes", WHOLE_BYTES)

    def test_nothing_is_left_to_the_collector(self) -> None:
        """When a put has ended, its memory is free at once: what refers to each other is taken apart."""
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        self.make()
        self.put()
        self.assertEqual([each for each in gc.get_objects() if type(each) is SmallFileUpload], [])


class WholeExistingSharesTests(test_upload.ExistingSharesTests):
    """What is there already."""

    def setUp(self) -> None:
        self.patch(Line, "whole_bytes", WHOLE_BYTES)


class WholePatienceTests(test_upload.PatienceTests):
    """Slow and silent servers."""

    def setUp(self) -> None:
        self.patch(Line, "whole_bytes", WHOLE_BYTES)

    def test_a_server_is_not_silent_while_it_owes_nothing(self) -> None:
        """Between the coding of a small file and its way out there is nothing to wait for."""
        self.make(test_upload.SMALL, World(upload=UploadSettings(silence_s=RTT)))
        self.put()
        self.assertEqual(self.took, RTT)


class WholeProgressTests(test_upload.ProgressTests):
    """What callers are told."""

    def setUp(self) -> None:
        self.patch(Line, "whole_bytes", WHOLE_BYTES)


class WholeRandomTests(test_random.RandomTests):
    """Whatever happens."""

    def setUp(self) -> None:
        self.patch(Line, "whole_bytes", WHOLE_BYTES)
        super().setUp()


class OneMoveTests(test_upload.UploadTestCase):
    """Most files need no more."""

    def setUp(self) -> None:
        self.patch(Line, "whole_bytes", WHOLE_BYTES)
        self.uploads = 0
        make = Upload.__init__

        def counted(upload: Upload, *arguments: Any) -> None:
            self.uploads += 1
            make(upload, *arguments)

        self.patch(Upload, "__init__", counted)

    def test_the_longest_over_foolscap(self) -> None:
        """All that can be made whole go so, each in a call that is put together at once."""
        geometry = Params().geometry(3 * encoder.MAX_BLOCK_BYTES)
        self.assertTrue(encoder.is_single_segment(geometry))
        self.assertLessEqual(layout.share_bytes(geometry), client.WHOLE_BYTES)
        self.assertTrue(can_pack((0, bytes(client.WHOLE_BYTES))))

    def test_a_small_file_needs_no_upload(self) -> None:
        """One round trip, ten shares, and nothing that knows of segments."""
        self.make()
        self.put()
        self.assertEqual((self.uploads, self.took), (0, RTT))
        self.assertEqual(self.result.happiness, 10)
        self.assertEqual(
            self.result.shares_placed, {n: line.name for n, line in enumerate(self.ring)}
        )

    def test_a_file_that_is_there_needs_none(self) -> None:
        """It is found, and its leases are renewed."""
        self.make()
        self.put()
        self.put()
        self.assertEqual((self.uploads, self.took), (0, RTT))
        self.assertEqual(self.result.shares_placed, {})
        self.assertEqual(set(self.result.shares_found), set(range(10)))
        self.assertEqual(self.result.happiness, 10)

    def test_one_refusal_goes_over_to_an_upload(self) -> None:
        """It costs one round trip more, as with other files."""
        self.make()
        self.ring[4].down = True
        self.put()
        self.assertEqual((self.uploads, self.took), (1, 2 * RTT))
        self.assertEqual(len(self.result.shares_placed), 10)


class Slow:
    """A put that only notes that it is overdue."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.told = 0

    def overdue(self) -> None:
        """Note it."""
        self.told += 1


class OverdueTests(SynchronousTestCase):
    """One timer for all."""

    def test_each_at_its_time(self) -> None:
        """However many, no more than one timer; none is left."""
        clock = HeapClock()
        overdue = Deadlines(clock, 2.0)
        early, late, done, nearer = Slow(3.0), Slow(4.0), Slow(1.0), Slow(60.0)
        for each in (early, late, done, nearer):
            overdue.add(each)
        overdue.discard(done)
        self.assertEqual(len(clock.getDelayedCalls()), 1)
        clock.advance(1.0)
        nearer.due_s = 3.5
        clock.advance(1.0)
        self.assertEqual((early.told, late.told, nearer.told), (0, 0, 0))
        clock.advance(1.0)
        self.assertEqual((early.told, late.told, nearer.told), (1, 0, 0))
        clock.advance(0.5)
        self.assertEqual((early.told, late.told, nearer.told), (1, 0, 1))
        clock.advance(0.5)
        self.assertEqual((early.told, late.told, done.told), (1, 1, 0))
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_after_a_long_turn(self) -> None:
        """What has arrived while the process was busy is read before a server counts as silent."""
        clock = HeapClock()
        overdue = Deadlines(clock, 5.0)
        active, silent = Slow(3.0), Slow(3.0)
        overdue.add(active)
        overdue.add(silent)
        clock.callLater(3.0, setattr, active, "due_s", 4.0)
        clock.advance(3.0)
        self.assertEqual((active.told, silent.told), (0, 1))
        clock.advance(1.0)
        self.assertEqual((active.told, silent.told), (1, 1))
        self.assertEqual(clock.getDelayedCalls(), [])
