"""RPM repositories in virtual time: what is kept, in which order it is seen, and what is refused."""

from __future__ import annotations

import os
import random
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import rpm_repository
from pipegrid.mirror.archive_file import BadEntry, MirrorError
from pipegrid.mirror.debian_release_files import in_order
from pipegrid.mirror.decompression import unpacked
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_scheduler import Scheduler
from pipegrid.mirror.rpm_metadata import packages, read_repomd
from pipegrid.mirror.rpm_repository import RpmOutcome, RpmRepository
from pipegrid.mirror.signatures import Keys
from pipegrid.testing.network import leaks, run
from tests.mirror.archive import Signer, sha
from tests.mirror.rpmarchive import PACKERS, REPOMD, RpmArchive
from tests.mirror.world import MirrorWorld, as_written, ok

UNSIGNED = Keys(allow_unsigned=True)
HIDDEN = ".pipegrid-mirror"


class RpmCase(SynchronousTestCase):
    """A repository, its mirrors, and a directory."""

    def make(self, archive: RpmArchive, hosts: int = 1, **options: Any) -> MirrorWorld:
        """Begin anew."""
        self.archive = archive
        self.world = MirrorWorld(self.mktemp(), {}, hosts, **options)
        for host in self.world.hosts:
            host.files = archive.files
        return self.world

    def publish(self, *numbers: int) -> None:
        """Mirrors have what the repository has now; all, or these."""
        self.archive.publish()
        for number, host in enumerate(self.world.hosts):
            if not numbers or number in numbers:
                host.files = self.archive.files

    def sync(
        self,
        keys: Keys = UNSIGNED,
        delete: bool = False,
        dry_run: bool = False,
        newest_only: bool = False,
        **mirror: Any,
    ) -> RpmOutcome:
        """Bring it up to date; nothing may be left afterwards."""
        world = self.world
        for host in world.hosts:
            host.requests.clear()
        made = world.mirror(dry_run=dry_run, **mirror)
        try:
            repository = RpmRepository(made, keys, newest_only)
            outcome: RpmOutcome = run(
                world.clock,
                Deferred.fromCoroutine(repository.sync(delete, dry_run)),
                limit_s=3600,
                network=world.network,
            )
        finally:
            run(world.clock, made.close(), network=world.network)
        world.clock.advance(10)
        left = leaks(world.clock, world.network)
        assert not left, left
        return outcome

    def skips(self, words: str) -> None:
        """Look that an entry is skipped, named and counted, and that all else is there and to be seen."""
        outcome = self.sync(delete=True)
        self.assertEqual(outcome.entries.skipped_files, 1)
        self.assertIn(words, outcome.entries.skipped[0])
        self.assertNotIn("\n", outcome.entries.skipped[0])
        self.assertEqual(outcome.removed, [])
        self.assertEqual(self.world.found()[REPOMD], self.archive.files[REPOMD])

    def refused(self, words: str, error: type[Exception] = MirrorError, **options: Any) -> None:
        """Look that a run ends in one sentence, and that nothing that can be seen has changed."""
        before = self.world.found()
        found = self.assertRaises(error, self.sync, **options)
        self.assertIn(words, str(found))
        self.assertNotIn("\n", str(found))
        self.assertEqual(self.world.found(), before)


class OrdinaryTests(RpmCase):
    """Nothing goes wrong."""

    def test_all_of_it(self) -> None:
        """All files are there, however indexes are packed, each asked for once; again costs nothing."""
        for ending in PACKERS:
            world = self.make(RpmArchive(ending=ending))
            outcome = self.sync()
            self.assertEqual(world.found(), self.archive.files, ending)
            self.assertEqual(outcome.report.fetched_files, 20)
            self.assertEqual(set(world.hosts[0].requests.values()), {1})
            self.assertGreater(outcome.index_bytes, 0)
            self.sync()
            self.assertEqual(set(world.hosts[0].requests), {REPOMD, REPOMD + ".asc"})
            self.assertEqual(os.listdir(world.directory / HIDDEN / "incoming"), [])

    def test_bases(self) -> None:
        """A package whose base is a mirror's own URL is where that leads; one elsewhere is skipped."""
        archive = RpmArchive(count=2)
        base = 'xml:base="http://m1/archive/pool/" '
        made = archive.add("elsewhere", further=base)
        archive.publish()
        archive.files[f"pool/{made.path}"] = archive.files.pop(made.path)
        world = self.make(archive, hosts=2)
        self.sync()
        self.assertEqual(world.found(), archive.files)
        self.assertEqual(self.sync(delete=True).removed, [])
        world = self.make(archive)
        self.skips("on another site (xml:base 'http://m1/archive/pool/')")
        del archive.files[f"pool/{made.path}"]
        self.assertEqual(world.found(), archive.files)

    def test_what_large_repositories_have(self) -> None:
        """Tags, and indexes of many kinds and forms, some of one kind: all are kept as they are."""
        archive = RpmArchive(count=3)
        rows = [
            "<tags><content>binary</content><repo>x</repo>"
            '<distro cpeid="cpe:/o:x:x:42">X 42</distro></tags>'
        ]
        further = {}
        for kind, name in (
            ("primary_zck", "primary.xml.zck"),
            ("primary_db", "primary.sqlite.bz2"),
            ("modules", "modules.yaml.xz"),
            ("group_gz", "comps.xml.gz"),
            ("updateinfo", "updateinfo.xml.bz2"),
            ("license", "license-1.tar.gz"),
            ("license", "license-2.tar.gz"),
        ):
            data = f"{kind} {name}".encode()
            further[f"repodata/{sha(data)}-{name}"] = data
            header = f'<header-checksum type="sha256">{sha(b"h")}</header-checksum>'
            rows.append(
                f'<data type="{kind}"><checksum type="sha256">{sha(data)}</checksum>{header}'
                f'<location href="repodata/{sha(data)}-{name}"/><timestamp>1700000000.5</timestamp>'
                f"<size>{len(data)}</size><header-size>1</header-size>"
                "<database_version>10</database_version></data>"
            )
        archive.data_xml = "".join(rows)
        archive.publish()
        archive.files.update(further)
        world = self.make(archive)
        self.sync(delete=True)
        self.assertEqual(world.found(), archive.files)

    def test_what_is_the_same(self) -> None:
        """``repomd.xml`` stays as old as it is while it says the same: readers ask whether it has changed."""
        world = self.make(RpmArchive())
        self.sync()
        path = world.directory / REPOMD
        before = as_written(path)
        self.sync()
        self.assertEqual(as_written(path), before)

    def test_round_trips(self) -> None:
        """An unchanged repository costs two: a connection, and repomd.xml with its signature."""
        world = self.make(RpmArchive())
        self.sync()
        began_s = world.clock.seconds()
        self.sync()
        # 10 ms there, 10 ms back; ``sync`` itself lets 10 s go by at the end.
        self.assertLess(world.clock.seconds() - began_s - 10, 2.5 * 0.02)

    def test_a_new_generation(self) -> None:
        """What is new is fetched; what is not named goes if asked, a generation later, with its index."""
        world = self.make(RpmArchive())
        self.sync()
        first = self.archive.files
        gone = self.archive.packages.pop()
        new = self.archive.add("new")
        self.publish()
        outcome = self.sync(delete=True, dry_run=True)
        self.assertEqual((outcome.removed, outcome.report.fetched_files), ([], 1))
        self.assertEqual(world.found(), first)
        outcome = self.sync(delete=True)
        self.assertEqual((outcome.removed, outcome.report.fetched_files), ([], 1))
        old = {
            path: data for path, data in first.items() if "-primary" in path or path == gone.path
        }
        self.assertEqual(world.found(), {**self.archive.files, **old})
        self.assertIn(new.path, world.found())
        self.archive.add("newer")
        second = self.archive.primary_path
        self.publish()
        self.assertEqual(sorted(self.sync(delete=True).removed), sorted(old))
        self.assertIn(second, world.found())

    def test_the_order_of_deletion(self) -> None:
        """Indexes go before what they name, wherever that is: a run that is killed leaves none without."""
        self.make(RpmArchive(count=1))
        self.archive.add("old", path="x86_64/old.rpm")
        gone: list[str] = []
        really = Destination.delete

        def noting(destination: Destination, path: str) -> None:
            gone.append(path)
            really(destination, path)

        self.patch(Destination, "delete", noting)
        for _ in range(3):
            self.publish()
            self.sync(delete=True)
            self.archive.packages = self.archive.packages[:1]
            self.archive.add("new")
        gone = [path for path in gone if path.endswith((".rpm", ".zst"))]
        self.assertIn("-primary", gone[0])
        self.assertEqual(gone[1:], ["x86_64/old.rpm"])
        paths = ["x.deb", "dists/x.deb", "by-hash/SHA256/0", "Packages.gz", "dists/y/by-hash/1"]
        self.assertEqual(in_order(paths), [*paths[2:], *paths[:2]])

    def test_verify(self) -> None:
        """All that is kept can be verified, indexes and repomd.xml too."""
        world = self.make(RpmArchive())
        self.sync()
        for path in (REPOMD, self.archive.primary_path, self.archive.packages[3].path):
            (world.directory / path).write_bytes(b"x")
            mirror = world.mirror()
            report = run(world.clock, mirror.verify(), network=world.network)
            run(world.clock, mirror.close(), network=world.network)
            self.assertEqual((report.failed_files, report.wanted_files), (1, 24), path)
            self.sync()

    def test_newest_only(self) -> None:
        """Of each name and architecture the highest version as rpm orders them; of modules all."""
        archive = RpmArchive(count=0)
        for name, *version in (
            ("a", "0", "1.9", "1"),
            ("a", "0", "1.10~rc1", "1"),
            ("a", "0", "1.10", "1"),
            ("b", "1", "1", "1"),
            ("b", "0", "9", "9"),
            ("m", "0", "1", "1.module+el8"),
            ("m", "0", "2", "1.module+el8"),
        ):
            archive.add(name, *version)
        archive.add("a", "0", "1.9", "1", arch="i686")
        archive.publish()
        random.Random(3).shuffle(archive.packages)
        archive.publish()
        world = self.make(archive)
        outcome = self.sync(newest_only=True)
        self.assertEqual(
            sorted(path for path in world.found() if path.endswith(".rpm")),
            [
                "Packages/a/a-1.10-1.x86_64.rpm",
                "Packages/a/a-1.9-1.i686.rpm",
                "Packages/b/b-1-1.x86_64.rpm",
                "Packages/m/m-1-1.module+el8.x86_64.rpm",
                "Packages/m/m-2-1.module+el8.x86_64.rpm",
            ],
        )
        self.assertEqual(outcome.report.fetched_files, 5)
        self.sync()
        self.assertEqual(world.found(), archive.files)
        self.assertEqual(len(self.sync(newest_only=True, delete=True).removed), 3)

    def test_while_primary_is_read(self) -> None:
        """The first packages are planned before the last are read."""
        self.make(RpmArchive(count=1000))
        planned: list[Any] = []
        at_the_last: list[int] = []
        add = Scheduler.add

        def noted(plan: Scheduler, each: Any) -> None:
            planned.append(each)
            add(plan, each)

        def watched(blocks: Any, *rest: Any) -> Any:
            for number, each in enumerate(packages(blocks, *rest)):
                if number == 999:
                    at_the_last.append(len(planned))
                yield each

        with (
            patch.object(rpm_repository, "packages", watched),
            patch.object(Scheduler, "add", noted),
        ):
            self.sync()
        self.assertGreater(at_the_last[0], 500)


class TrustTests(RpmCase):
    """Who is believed."""

    def setUp(self) -> None:
        self.signer = Signer()
        self.addCleanup(self.signer.close)
        self.keys = Keys((self.signer.armored,))

    def test_signed(self) -> None:
        """repomd.xml.asc is checked, and kept."""
        world = self.make(RpmArchive(self.signer))
        self.sync(self.keys)
        self.assertIn(REPOMD + ".asc", world.found())
        self.archive.add("x")
        self.publish()
        self.sync(self.keys)
        self.assertEqual(world.found()[REPOMD + ".asc"], self.archive.files[REPOMD + ".asc"])

    def test_not_signed(self) -> None:
        """No signature, one of another text, one of another key: nothing is used."""
        self.make(RpmArchive(self.signer))
        files = self.archive.files
        signature = files.pop(REPOMD + ".asc")
        self.refused("is not signed; nothing of it was used", keys=self.keys)
        files[REPOMD + ".asc"] = signature
        text = files[REPOMD]
        files[REPOMD] = text.replace(b"<revision>1", b"<revision>2")
        self.refused("it was changed, or is damaged", keys=self.keys)
        other = Signer()
        self.addCleanup(other.close)
        files[REPOMD] = text
        files[REPOMD + ".asc"] = other.detached(text)
        self.refused("it is signed by another key", keys=self.keys)
        files[REPOMD + ".asc"] = b"<html>"
        self.refused("is not signed", keys=self.keys)
        self.refused("give --keyring", keys=Keys())

    def test_another_mirror(self) -> None:
        """Who is not to be believed does not decide, and gives packages all the same."""
        world = self.make(RpmArchive(self.signer), hosts=2)
        page = ok(b"<html>log in</html>")
        world.hosts[0].answer = lambda path: page if path.startswith(REPOMD) else None
        self.sync(self.keys)
        self.assertEqual(world.found(), self.archive.files)

    def test_older(self) -> None:
        """A mirror that is behind does not decide; alone it is told to be."""
        world = self.make(RpmArchive(), hosts=2)
        first = self.archive.files
        self.archive.add("new")
        self.publish()
        self.sync()
        kept = world.found()
        for host in world.hosts:
            host.files = first
        self.refused("older than the existing one")
        world.hosts[1].files = self.archive.files
        self.sync()
        self.assertEqual(world.found(), kept)

    def test_signature_that_went(self) -> None:
        """A signature of a generation before does not stay beside another repomd.xml."""
        world = self.make(RpmArchive(self.signer))
        self.sync(self.keys)
        self.publish()
        del self.archive.files[REPOMD + ".asc"]
        self.sync()
        self.assertNotIn(REPOMD + ".asc", world.found())


class FaultTests(RpmCase):
    """Mirrors that lie, and runs that end in between."""

    def test_wrong_indexes(self) -> None:
        """An index that is not what repomd.xml says, or is not there, changes nothing."""
        world = self.make(RpmArchive())
        self.sync()
        self.archive.add("x")
        self.publish()
        path = self.archive.primary_path
        good = self.archive.files[path]
        for data in (good[:-1], good + b"x", bytes(len(good)), b"<html>"):
            self.archive.files[path] = data
            self.refused("could not be fetched")
        del self.archive.files[path]
        self.refused("the old ones stay")
        self.archive.files[path] = good
        self.sync()
        self.assertEqual(set(world.found()) >= set(self.archive.files), True)

    def test_missing_package(self) -> None:
        """If one is missing the old indexes stay; the next run goes on."""
        world = self.make(RpmArchive())
        self.sync()
        old = self.archive.files
        first, second = self.archive.add("x"), self.archive.add("y")
        self.publish()
        data = self.archive.files.pop(first.path)
        outcome = self.sync(delete=True)
        self.assertEqual((outcome.report.failed_files, outcome.removed), (1, []))
        self.assertEqual(world.found(), {**old, second.path: second.data})
        self.archive.files[first.path] = data
        outcome = self.sync(delete=True)
        self.assertEqual(outcome.report.fetched_files, 1)
        self.assertEqual(world.found()[REPOMD], self.archive.files[REPOMD])

    def test_order(self) -> None:
        """At no moment does repomd.xml name what is not there."""
        world = self.make(RpmArchive(count=8))
        self.sync()
        self.archive.add("x")
        self.publish()
        real = os.rename
        seen: list[str] = []

        def rename(old: str, new: str, **further: Any) -> None:
            real(old, new, **further)
            seen.append(new)
            found = world.found()
            if found[REPOMD] == self.archive.files[REPOMD]:
                self.assertTrue(self.archive.files.keys() <= found.keys(), new)

        with patch.object(os, "rename", rename):
            self.sync(delete=True)
        self.assertEqual(seen[-1], "repomd.xml")

    def test_lying_sizes(self) -> None:
        """An index that unpacks to more than it should is not read on."""
        archive = RpmArchive()
        archive.files[REPOMD] = archive.files[REPOMD].replace(
            f"<open-size>{len(archive.primary())}<".encode(), b"<open-size>100<"
        )
        self.make(archive)
        self.refused("has more than 100 bytes, unpacked", BadEntry)
        archive.files[REPOMD] = archive.files[REPOMD].replace(b"size>100<", b"size>99999999999<")
        self.refused("which no index has")

    def test_bad_entries(self) -> None:
        """A path that leads out, a document type: one sentence, and nothing has changed."""
        archive = RpmArchive(count=3)
        self.make(archive)
        self.sync()
        made = archive.add("evil", path="../../evil")
        self.publish()
        self.skips("leads out of the mirror")
        made.path = "Packages/evil.rpm"
        archive.head = '<!DOCTYPE metadata [<!ENTITY a "b">]>'
        self.publish()
        self.refused("a document type", BadEntry)

    def test_packages_in_the_place_of_indexes(self) -> None:
        """Whatever an index is called, no package takes its place; and no index that of another."""
        archive = RpmArchive(count=3)
        data = b"<other/>"
        archive.data_xml = (
            f'<data type="other"><checksum type="sha256">{sha(data)}</checksum>'
            f'<location href="Other/one.xml"/><size>{len(data)}</size></data>'
        )
        archive.files["Other/one.xml"] = data
        made = archive.add("evil", path="Packages/evil.rpm")
        archive.publish()
        archive.files["Other/one.xml"] = data
        world = self.make(archive)
        self.sync()
        self.assertEqual(world.found()["Other/one.xml"], data)
        for path in (
            "Other/one.xml",
            "other/One.xml",
            "repodata/repomd.xml",
            "Repodata/repomd.xml",
        ):
            made.path = path
            self.publish()
            self.skips("names the package")
        made.path = "Packages/evil.rpm"
        archive.data_xml = archive.data_xml.replace("Other/one.xml", "repodata/Repomd.xml")
        self.publish()
        self.skips("which has another meaning")

    def test_links(self) -> None:
        """A symbolic link in DEST is not followed out of it."""
        world = self.make(RpmArchive())
        outside = self.mktemp()
        os.mkdir(outside)
        world.directory.mkdir()
        (world.directory / "Packages").symlink_to(os.path.abspath(outside))
        self.assertRaises(BadEntry, self.sync)
        self.assertEqual(os.listdir(outside), [])

    def test_cuts_anywhere(self) -> None:
        """A run that ends at any moment leaves what can be read, and the next one what is wanted."""
        seed = random.randrange(1 << 30)
        rng = random.Random(seed)
        world = self.make(RpmArchive(count=30))
        self.sync()
        for _ in range(25):
            self.archive.packages.pop(rng.randrange(len(self.archive.packages)))
            self.archive.add(f"n{rng.randrange(1 << 30)}")
            self.publish()
            made = world.mirror()
            repository = RpmRepository(made, UNSIGNED)
            running = Deferred.fromCoroutine(repository.sync(delete=True))
            running.addErrback(lambda _: None)
            world.clock.advance(rng.random() * 0.2)
            running.cancel()
            run(world.clock, made.close(), network=world.network)
            found = world.found()
            self.check_readers(found, seed)
        self.sync(delete=True)
        self.check_readers(world.found(), seed)

    def check_readers(self, found: dict[str, bytes], seed: int) -> None:
        """Look that all that repomd.xml and primary name is there."""
        repomd = read_repomd(found[REPOMD], "x")
        for each in repomd.files:
            self.assertEqual(len(found[each.file.path]), each.file.size, seed)
        path = self.world.directory / repomd.primary.file.path
        for package in packages(unpacked(str(path)), "x"):
            self.assertEqual(len(found[package.file.path]), package.file.size, seed)
