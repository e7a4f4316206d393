"""Records with caps or content can appear in logs and in errors, and show none of it there."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import parse_cap
from pipegrid.core.encoder import ShareWrite
from pipegrid.core.mutable.directory_content_edits import LazyEntry
from pipegrid.tree.backup.backup_state_directory import CatalogueState
from pipegrid.tree.backup.catalogue_store import ChangedCatalogue
from pipegrid.tree.directory_reading import Entry, Listing
from pipegrid.tree.grid_paths import PathEnd
from pipegrid.tree.local_walk import FileMet
from pipegrid.tree.walk_order import Found, Unreadable

HIDDEN = b'{"of": "URI:hidden"}'
CAP = parse_cap("URI:CHK:" + "a" * 26 + ":" + "a" * 52 + ":3:10:99")


class RepresentationTests(SynchronousTestCase):
    """What records show of themselves."""

    def test_content_caps_and_metadata_stay_out_of_sight(self) -> None:
        """A record shows its name or path, and none of its content."""
        entry = Entry("name", CAP, CAP, HIDDEN)
        for record, shown in (
            (LazyEntry("name", HIDDEN), "name"),
            (entry, "name"),
            (Listing((entry,), 99), "99"),
            (Found(("name",), CAP, "file", HIDDEN, False, Listing((entry,), 99), CAP), "name"),
            (Unreadable(("name",), CAP, ValueError("damaged"), HIDDEN, CAP), "damaged"),
            (PathEnd(CAP, ("name",), HIDDEN, CAP), "name"),
            (FileMet(0, b"name", "a/name", os.stat("/"), 0, HIDDEN, HIDDEN), "a/name"),
            (CatalogueState(None, HIDDEN, (), 7), "7"),
            (ChangedCatalogue(HIDDEN, 7, (), ()), "7"),
            (ShareWrite(7, 12, (HIDDEN,)), "12"),
        ):
            for text in (repr(record), str(record), f"{record}"):
                self.assertIn(shown, text)
                self.assertNotIn("hidden", text)
                self.assertLess(len(text), 300)
