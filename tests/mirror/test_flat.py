"""Flat Debian archives in virtual time: what of one is kept, beside what others, and what is refused."""

from __future__ import annotations

import gzip
import lzma
from typing import Any

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import ArchiveFile, BadEntry, MirrorError
from pipegrid.mirror.archive_to_grid import is_index
from pipegrid.mirror.debian_archive import DebianOutcome, names_by_hash
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.signatures import Keys
from pipegrid.testing.network import run
from tests.mirror.archive import Archive, Signer, sha
from tests.mirror.flatarchive import FlatArchive
from tests.mirror.test_debian import DebianCase
from tests.mirror.world import MirrorWorld


class FlatCase(DebianCase):
    """A flat archive, its mirror, and a directory."""

    def begin(self, archive: FlatArchive) -> MirrorWorld:
        """Begin anew."""
        self.flat = archive
        self.world = MirrorWorld(self.mktemp(), archive.files)
        return self.world

    def sync_flat(self, suite: str = "./", **options: Any) -> DebianOutcome:
        """Bring it up to date, as the mirror has it now."""
        return self.sync(suites=(suite,), components=(), **options)

    def verified(self) -> tuple[int, int]:
        """How many files ``verify`` finds wrong, and how many it wants."""
        mirror = self.world.mirror()
        report = run(self.world.clock, mirror.verify(), network=self.world.network)
        run(self.world.clock, mirror.close(), network=self.world.network)
        return report.failed_files, report.wanted_files

    def everything(self, *without: str) -> dict[str, bytes]:
        """All files of the archive as it is now, but for the unpacked form of what is kept packed."""
        unpacked = {self.flat.directory + name for name in ("Packages", "Sources")}
        return {
            path: data
            for path, data in self.flat.files.items()
            if path not in unpacked and not path.endswith(without or ("\n",))
        }


class OrdinaryTests(FlatCase):
    """Nothing goes wrong."""

    def test_all_of_it(self) -> None:
        """Whatever its suite is called; of every architecture; with sources if asked for. Each file once."""
        for directory, names in (
            ("", ("/", "./", ".//", "/./")),
            ("sub/", ("sub/", "./sub/", "/sub/", "sub//")),
            ("dists/x/main/", ("dists/x/main/",)),
        ):
            for suite in names:
                world = self.begin(FlatArchive(directory=directory))
                outcome = self.sync_flat(suite)
                expected = self.everything("Sources.gz", "s_1.dsc", "s_1.tar.xz")
                self.assertEqual(world.found(), expected, suite)
                self.assertEqual(outcome.report.fetched_files, 5)
                outcome = self.sync_flat(suite, with_sources=True)
                self.assertEqual(world.found(), self.everything(), suite)
                self.assertEqual(outcome.report.fetched_files, 2)
                self.sync_flat(suite, with_sources=True)
                self.assertEqual(
                    set(world.hosts[0].requests),
                    {directory + name for name in ("InRelease", "Release", "Release.gpg")},
                )
                self.assertEqual(self.verified(), (0, len(world.found())))

    def test_without_sources(self) -> None:
        """One that has none gives none; one that has nothing else is mirrored as well."""
        world = self.begin(FlatArchive(sources=False))
        self.sync_flat(with_sources=True)
        self.assertEqual(world.found(), self.everything())
        archive = FlatArchive()
        named = {"Sources": archive.sources_text()}
        archive.files = {
            **named,
            **archive.source,
            "Release": archive.release_text(named),
        }
        world = self.begin(archive)
        self.sync_flat(with_sources=True)
        self.assertEqual(world.found(), archive.files)

    def test_directories_of_sources(self) -> None:
        """As scanners write them."""
        for directory in ("./src", "src/", "./", "src"):
            archive = FlatArchive(count=1)
            archive.source_directory = directory
            archive.publish()
            world = self.begin(archive)
            self.sync_flat(with_sources=True)
            self.assertEqual(world.found(), self.everything(), directory)

    def test_signed(self) -> None:
        """By whom, and in which of two ways; a wrong signature brings nothing."""
        signer, other = Signer(), Signer()
        for each in (signer, other):
            self.addCleanup(each.close)
        archive = FlatArchive(signer, sources=False)
        keys = Keys((signer.keyring,))
        for without in ("InRelease", "Release"):
            world = self.begin(archive)
            world.hosts[0].files = {p: d for p, d in archive.files.items() if p != without}
            self.sync_flat(keys=keys)
            self.assertIn("Packages.gz", world.found())
        world = self.begin(archive)
        self.refused(
            "no mirror has a release file of './' that can be trusted",
            suites=("./",),
            components=(),
            keys=Keys((other.keyring,)),
        )
        self.assertEqual(world.found(), {})

    def test_a_new_generation(self) -> None:
        """What is named no more goes; with names by hash a generation later."""
        for by_hash in (False, True):
            for form in ("packed", "unpacked", "zstd"):
                world = self.begin(FlatArchive(by_hash=by_hash))
                self.sync_flat(indexes=form, with_sources=True)
                gone = next(iter(self.flat.pool))
                del self.flat.pool[gone]
                added = self.flat.add()
                self.flat.publish()
                world.hosts[0].files = self.flat.files
                outcome = self.sync_flat(indexes=form, with_sources=True, delete=True)
                late = by_hash and form != "zstd"
                self.assertEqual(outcome.removed, [] if late else [gone], (by_hash, form))
                self.assertEqual(outcome.report.fetched_files, 1)
                self.assertIn(added, world.found())
                self.flat.publish()
                world.hosts[0].files = self.flat.files
                outcome = self.sync_flat(indexes=form, with_sources=True, delete=True)
                self.assertEqual(gone in outcome.removed, late, (by_hash, form))
                self.assertNotIn(gone, world.found())

    def test_every_step(self) -> None:
        """No index that is seen names what is not there: packages come before it, release files last."""
        world = self.begin(FlatArchive(sources=False))
        self.sync_flat()
        added = self.flat.add()
        self.flat.publish()
        world.hosts[0].files = {p: d for p, d in self.flat.files.items() if p != added}
        before = world.found()
        outcome = self.sync_flat(delete=True)
        self.assertEqual(outcome.report.failed_files, 1)
        self.assertEqual(world.found(), before)
        seen: list[str] = []
        real = Destination.release

        def release(destination: Destination, paths: Any) -> None:
            for path in paths:
                seen.append(path)
                self.assertTrue((world.directory / added).exists())
                real(destination, [path])

        self.patch(Destination, "release", release)
        world.hosts[0].files = self.flat.files
        self.sync_flat()
        self.assertEqual(seen, ["Packages.gz", "Release"])

    def test_from_a_grid(self) -> None:
        """What brings an archive back shows its indexes last, and knows their names by hash."""
        world = self.begin(FlatArchive(by_hash=True))
        self.sync_flat(with_sources=True)
        found = world.found()
        self.assertEqual(
            {path for path in found if is_index(path) and "by-hash" not in path},
            {"Release", "Packages.gz", "Sources.gz"},
        )
        destination = Destination(str(world.directory))
        self.addCleanup(destination.close)
        entries = [
            ArchiveFile(p, len(d), "sha256", bytes.fromhex(sha(d))) for p, d in found.items()
        ]
        self.assertEqual(
            dict(names_by_hash(destination, entries)),
            {name: f"by-hash/SHA256/{sha(found[name])}" for name in ("Packages.gz", "Sources.gz")},
        )


class TogetherTests(FlatCase):
    """Several runs to one directory: none removes what another one keeps."""

    def setUp(self) -> None:
        self.begin(FlatArchive(by_hash=True))
        self.sub = FlatArchive(directory="sub/", count=3, by_hash=True)
        self.archive = Archive()
        self.merge()

    def merge(self) -> None:
        """The mirror has all three as they are now."""
        self.world.hosts[0].files = {
            **self.archive.files,
            **self.sub.files,
            **self.flat.files,
        }

    def test_in_turns(self) -> None:
        """Two flat suites and an ordinary one: each goes on, and what it names no more goes."""
        runs: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("./", ()),
            ("sub/", ()),
            ("sid", ("main",)),
        )
        for form in ("packed", "unpacked", "zstd"):
            self.setUp()
            for suite, components in runs:
                self.sync(suites=(suite,), components=components, indexes=form, with_sources=True)
            everything = self.world.found()
            for suite, components in runs:
                outcome = self.sync(
                    suites=(suite,),
                    components=components,
                    indexes=form,
                    with_sources=True,
                    delete=True,
                )
                self.assertEqual(outcome.removed, [], (form, suite))
            self.assertEqual(self.world.found(), everything)
            # What an index of before names stays, as well, for whoever has just read its release file.
            gone = next(iter(self.sub.pool))
            del self.sub.pool[gone]
            self.sub.publish()
            self.merge()
            self.sync(suites=("sub/",), components=(), indexes=form, with_sources=True)
            (self.world.directory / "stray").write_bytes(b"x")
            outcome = self.sync(indexes=form, with_sources=True, delete=True)
            self.assertEqual(
                set(outcome.removed), {"stray", *([gone] if form == "zstd" else [])}, form
            )
            for path in ("sub/Release", "Release"):
                (self.world.directory / path).unlink()
            self.sync(indexes=form, with_sources=True, delete=True)
            self.assertEqual(
                {path.split("/")[0] for path in self.world.found()}, {"dists", "pool"}, form
            )

    def test_a_generation_in_all_its_forms(self) -> None:
        """What old indexes of packages and sources name stays; by hash they are in one directory."""

        def publish() -> None:
            self.sub.further = {
                "Packages.xz": lzma.compress(self.sub.packages_text()),
                "Sources.xz": lzma.compress(self.sub.sources_text()),
            }
            self.sub.publish()
            self.merge()
            self.sync_flat("sub/", with_sources=True)

        publish()
        del self.sub.pool[min(self.sub.pool)]
        self.sub.source = {"s_2.dsc": b"other"}
        publish()
        before = self.world.found()
        self.sync(delete=True)
        self.assertLessEqual(before.keys(), self.world.found().keys())

    def test_in_one_run(self) -> None:
        """Components are those of the suites that have any."""
        self.sync(suites=("sid", "sub/", "./"), components=("main",))
        self.assertLessEqual(
            {"sub/Packages.gz", "Packages.gz", "Release", "sub/Release"}, self.world.found().keys()
        )

    def test_packages_and_sources(self) -> None:
        """A run for each: sources stay, and are brought up to date with packages."""
        self.sync_flat()
        self.sync_flat(with_sources=True)
        self.sync_flat("sub/")  # so that the last run kept others
        outcome = self.sync_flat(delete=True)
        self.assertEqual(outcome.removed, [])
        self.assertIn("Sources.gz", self.world.found())
        self.flat.source["s_1.dsc"] = b"other"
        self.flat.publish()
        self.merge()
        self.sync_flat("sub/")
        self.sync_flat(delete=True)
        found = self.world.found()
        for path in ("Sources.gz", "Packages.gz", "s_1.dsc"):
            self.assertEqual(found[path], self.world.hosts[0].files[path])

    def test_what_cannot_be_read(self) -> None:
        """A release file beside an index that says nothing: nothing is removed. Alone it is any file."""
        self.sync_flat("sub/")
        (self.world.directory / "sub/Release").write_bytes(b"no")
        found = self.assertRaises(MirrorError, self.sync, delete=True)
        self.assertIn("sub/Release cannot be read", str(found))
        self.assertIn("sub/Packages.gz", self.world.found())
        alone = self.world.directory / "alone"
        alone.mkdir()
        (alone / "Release").write_bytes(b"no")
        for name in ("Release", "Packages.gz"):
            (self.world.directory / "sub" / name).unlink()
        self.assertIn("alone/Release", self.sync(delete=True).removed)


class RefusalTests(FlatCase):
    """What is not believed, or not done."""

    def test_names_of_indexes(self) -> None:
        """No package is called as a release file or an index of any flat suite is."""
        data = b"a package"
        digest = sha(data)
        for path in (
            "Release",
            "InRelease",
            "Packages",
            "packages.GZ",
            "other/Release.gpg",
            "other/Sources.xz",
            "other/Packages.diff/T-2026-01-01.gz",
            f"by-hash/SHA256/{digest}",
            "notes",
            "Icons.tar.gz",
        ):
            archive = FlatArchive(count=1)
            archive.further = {"notes": b"notes", "icons.tar.gz": b"icons"}
            archive.extra_paragraphs = f"Filename: {path}\nSize: {len(data)}\nSHA256: {digest}\n\n"
            archive.publish()
            self.begin(archive)
            outcome = self.sync(suites=("./",), components=(), also=("icons*",))
            self.assertEqual(outcome.entries.skipped_files, 1)
            self.assertIn("where only indexes and release files may be", outcome.entries.skipped[0])

    def test_a_release_file_that_names_packages(self) -> None:
        """Scripts list all that there is, by two names each; apt reads it, and packages are packages."""
        archive = FlatArchive(count=2, sources=False)
        archive.further = {"./Packages": b"other", **archive.pool}
        archive.publish()
        world = self.begin(archive)
        self.sync_flat()
        self.assertEqual(world.found(), {p: d for p, d in self.everything().items() if p[0] != "."})
        self.sync_flat(also=("*",), delete=True)
        self.assertEqual(world.found(), {p: d for p, d in self.everything().items() if p[0] != "."})

    def test_paths_that_lead_out(self) -> None:
        """As with any index."""
        for path in ("../x.deb", "a/../../x.deb", ".pipegrid-mirror/x.deb"):
            archive = FlatArchive(count=1)
            archive.extra_paragraphs = f"Filename: {path}\nSize: 1\nSHA256: {sha(b'x')}\n\n"
            archive.publish()
            self.begin(archive)
            outcome = self.sync(suites=("./",), components=())
            self.assertEqual(outcome.entries.skipped_files, 1)
            self.assertIn("not to be trusted", outcome.entries.skipped[0])
            self.assertTrue(archive.pool.items() <= self.world.found().items())

    def test_bad_names(self) -> None:
        """One sentence each."""
        self.begin(FlatArchive())
        for suite in ("../", "a/../", "a\\/", ".", "sub/."):
            self.refused("is not a suite", error=UsageError, suites=(suite,), components=())
        self.refused(
            "the suite ./ is flat, as all that end in a slash, and has no components",
            error=UsageError,
            suites=("/",),
            components=("main",),
        )
        self.refused("has no other/InRelease and no Release", suites=("other/",), components=())
        self.world.hosts[0].files = {"Release": self.flat.release_text({"x": b"y"})}
        self.refused(
            "the release file of ./ names no Packages, so that apt could not use it",
            suites=("./",),
            components=(),
        )

    def test_too_large(self) -> None:
        """An index with more than its release file says is not used."""
        archive = FlatArchive(count=1, sources=False)
        text = archive.packages_text()
        named = {"Packages": text[:-1], "Packages.gz": gzip.compress(text)}
        archive.files = {**named, "Release": archive.release_text(named)}
        self.begin(archive)
        self.refused("unpacked; it is not used", error=BadEntry, suites=("./",), components=())
