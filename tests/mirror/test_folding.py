"""Paths that are one file on the disk: none gets another's bytes, or is removed for its letters."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.archive_file import ArchiveFile, PathCollisions, holder
from pipegrid.mirror.debian_archive import DebianOutcome
from pipegrid.mirror.destination import Destination, ReadOnlyDestination
from tests.mirror.archive import Archive
from tests.mirror.folded import fold_cases
from tests.mirror.rpmarchive import RpmArchive
from tests.mirror.test_debian import DebianCase
from tests.mirror.test_rpm import RpmCase
from tests.mirror.world import MirrorWorld


class PlacesTests(SynchronousTestCase):
    """What can be kept beside what."""

    def test_which(self) -> None:
        """The second of two with other bytes cannot, where names are folded."""
        one, same, other = (
            ArchiveFile(path, 1, "sha256", digest)
            for path, digest in (("Pool/a", b"1"), ("pool/A", b"1"), ("pool/a", b"2"))
        )
        places = PathCollisions(True)
        self.assertEqual([places.refusal(each) for each in (one, same, one)], [None] * 3)
        self.assertIn("it would be the same file as 'Pool/a'", str(places.refusal(other)))
        places = PathCollisions(False)
        self.assertEqual([places.refusal(each) for each in (one, same, other)], [None] * 3)

    def test_holder(self) -> None:
        """Names are compared as the file system does."""
        for folds in (False, True):
            holds = holder(["Pool/ä"], folds)
            self.assertEqual(
                [holds(path) for path in ("Pool/ä", "pool/Ä", "pool/a")], [True, folds, False]
            )


class ListTests(SynchronousTestCase):
    """``mirror list``."""

    def test_two_that_are_one(self) -> None:
        """One is kept and right, of the other one sentence says why it is not; the rest is there."""
        files = {"pool/a.deb": b"small", "Pool/A.deb": b"LARGE", "pool/b": b"b", "Pool/C": b"c"}
        directory = self.mktemp()
        world = MirrorWorld(directory, files)
        report = world.sync()
        self.assertEqual((report.failed_files, len(world.found())), (0, 4))
        fold_cases(self)
        for _ in range(2):
            world = MirrorWorld(f"{directory}/folded", files)
            report = world.sync()
            self.assertEqual(report.failed_files, 1)
            ((path, why),) = report.failed
            self.assertEqual(path, "Pool/A.deb")
            self.assertIn("it would be the same file as 'pool/a.deb', which has other bytes", why)
            self.assertEqual(
                world.found(), {"pool/a.deb": b"small", "pool/b": b"b", "pool/c": b"c"}
            )
        # Others that fail are told of as well.
        world = MirrorWorld(self.mktemp(), files)
        world.hosts[0].files = {path: data for path, data in files.items() if path != "pool/b"}
        report = world.sync(world.entries())
        self.assertEqual(
            (report.failed_files, {path for path, _ in report.failed}),
            (2, {"Pool/A.deb", "pool/b"}),
        )

    def test_whether_it_folds(self) -> None:
        """It is looked up at the mirror itself, also by who only looks."""
        path = self.mktemp()
        found = []
        for kind in (Destination, ReadOnlyDestination):
            destination = kind(path)
            found.append(destination.folds)
            destination.close()
        fold_cases(self)
        for kind in (Destination, ReadOnlyDestination):
            destination = kind(path)
            found.append(destination.folds)
            destination.close()
        destination = ReadOnlyDestination(self.mktemp())
        found.append(destination.folds)
        destination.close()
        self.assertEqual(found, [False, False, True, True, False])


class RepositoryTests(RpmCase):
    """``mirror rpm``."""

    def test_deletion(self) -> None:
        """What the indexes of before name stays for a generation, in whatever letters it lies there."""
        world = self.make(RpmArchive(count=3))
        fold_cases(self, os.path.abspath(world.directory) + "/")
        self.assertEqual(self.sync(delete=True).removed, [])
        gone = self.archive.packages.pop()
        self.publish()
        self.assertEqual(self.sync(delete=True).removed, [])
        self.publish()
        self.assertIn(gone.path.lower(), self.sync(delete=True).removed)


class DebianTests(DebianCase):
    """``mirror debian``."""

    def sync_all(self) -> DebianOutcome:
        """Bring it up to date, and remove what is not named."""
        return self.sync(delete=True)

    def test_deletion(self) -> None:
        """What is there in other letters than the index has is not removed; what is named no more is."""
        archive = Archive(
            packages={"pool/main/P/Package_1_amd64.deb": b"x", "pool/B_1_all.deb": b"b"}
        )
        world = self.make(archive)
        fold_cases(self, os.path.abspath(world.directory) + "/")
        self.assertEqual(self.sync_all().removed, [])
        self.assertLessEqual(
            {"pool/main/p/package_1_amd64.deb", "pool/b_1_all.deb"}, world.found().keys()
        )
        archive.drop("pool/B_1_all.deb")
        for _ in range(2):  # names by hash keep the generation before
            self.publish()
            outcome = self.sync_all()
        self.assertIn("pool/b_1_all.deb", outcome.removed)
        self.assertIn("pool/main/p/package_1_amd64.deb", world.found())
        self.assertNotIn("pool/b_1_all.deb", world.found())

    def test_the_index_stays(self) -> None:
        """Where not all that a new index names can be kept, the old one stays."""
        archive = Archive(packages={"pool/a_1_amd64.deb": b"x"})
        world = self.make(archive)
        fold_cases(self, os.path.abspath(world.directory) + "/")
        self.sync_all()
        before = world.found()
        archive.pool["pool/A_1_amd64.deb"] = b"y"
        self.publish()
        outcome = self.sync_all()
        self.assertEqual((outcome.report.failed_files, world.found()), (1, before))
