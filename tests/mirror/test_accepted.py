"""What apt and dnf accept is accepted: as strict as the hash, and as lenient as they are."""

from __future__ import annotations

import itertools
import lzma
import os
from functools import partial
from hashlib import sha512
from typing import Any
from unittest.mock import patch

from pipegrid.mirror.archive_file import MirrorError
from pipegrid.mirror.manifest import read_manifest
from tests.mirror.archive import BINARY, SUITE, Archive, check_readers, sha
from tests.mirror.rpmarchive import REPOMD, RpmArchive
from tests.mirror.test_debian import DebianCase
from tests.mirror.test_rpm import RpmCase


def refused(status: int) -> bytes:
    """An answer in place of a file."""
    return b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\nno" % status


def _refuse_some(endings: tuple[str, ...], status: int, path: str) -> bytes | None:
    return refused(status) if path.endswith(endings) else None


class DebianTests(DebianCase):
    """Debian archives."""

    def amend(self, old: str, new: str) -> None:
        """Let the release file say something else."""
        archive = self.archive
        told = archive.release_text

        def release_text(named: Any) -> bytes:
            text = told(named).decode()
            assert old in text, old
            return text.replace(old, new, 1).encode()

        archive.release_text = release_text  # type: ignore[method-assign]
        archive.publish()
        for host in self.world.hosts:
            host.files = archive.files

    def amend_packages(self, text: str) -> None:
        """Let the index end with this."""
        self.archive.extra_paragraphs = text
        self.archive.publish()
        self.world.hosts[0].files = self.archive.files

    def test_any_refusal(self) -> None:
        """Files that need not be there may be refused with any status; if all are, the sentence has it."""
        for status in (400, 401, 403, 404, 405, 410, 451, 500):
            world = self.make(Archive())
            world.hosts[0].answer = partial(_refuse_some, ("Release.gpg", "InRelease"), status)
            self.sync()
            self.assertEqual(check_readers(world.directory), 40)
            world.hosts[0].answer = partial(_refuse_some, ("",), status)
            self.refused(f"answers {status}")

    def test_no_components(self) -> None:
        """They are those whose indexes are named; what selects nothing ends in a sentence."""
        self.make(Archive())
        self.amend("Components: main\n", "")
        self.sync(components=())
        self.assertEqual(check_readers(self.world.directory), 40)
        self.refused("names no mian/binary-amd64/Packages", components=("mian",))
        self.refused("names no mian/binary-amd64/Packages", components=("main", "mian"))
        self.refused("names no main/binary-armel/Packages", architectures=("armel",))
        self.refused("there is nothing to mirror", architectures=(), components=())

    def test_combinations_that_do_not_exist(self) -> None:
        """A component without sources, or without one architecture, has what it has; the rest is told of."""
        udeb = b"a udeb"
        path = "pool/main/u/u_1_amd64.udeb"
        text = f"Package: u\nFilename: {path}\nSize: {len(udeb)}\nSHA256: {sha(udeb)}\n\n".encode()
        archive = Archive()
        world = self.make(archive)
        index = "main/debian-installer/binary-amd64/Packages.xz"
        archive.further[index] = lzma.compress(text)
        archive.pool[path] = udeb
        archive.publish()
        world.hosts[0].files = archive.files
        outcome = self.sync(
            components=("main", "main/debian-installer"),
            with_sources=True,
        )
        self.assertEqual(world.found()[path], udeb)
        self.assertEqual(len(outcome.absent), 1)
        self.assertIn("names no main/debian-installer/source/Sources", str(outcome.absent))
        self.assertEqual(outcome.entries.skipped_files, 0)

    def test_any_selection_in_any_order(self) -> None:
        """Main, udebs and sources share a directory, whoever comes first when the archive has changed."""
        selections: list[dict[str, Any]] = [
            {"components": ("main",)},
            {"components": ("main/debian-installer",)},
            {"components": ("main",), "architectures": (), "with_sources": True},
            {"components": ("main",), "also": ("main/i18n/*",), "architectures": ("amd64",)},
        ]
        for number, order in enumerate(itertools.permutations(selections)):
            if number % 3:
                continue
            archive = Archive(count=3)
            world = self.make(archive)

            def change(mark: bytes, archive: Archive = archive) -> None:
                for path in [each for each in archive.pool if "udeb" in each]:
                    del archive.pool[path]
                path = f"pool/main/u/u_{sha(mark)}_amd64.udeb"
                text = f"Filename: {path}\nSize: {len(mark)}\nSHA256: {sha(mark)}\n\n".encode()
                archive.further["main/debian-installer/binary-amd64/Packages.xz"] = lzma.compress(
                    text
                )
                archive.further["main/i18n/Translation-en.xz"] = lzma.compress(mark)
                archive.pool[path] = mark
                archive.add()
                archive.add_source()
                archive.publish()
                self.world.hosts[0].files = archive.files

            change(b"one")
            for each in order:
                self.sync(**each)
            for generation in range(2):
                change(b"next %d" % generation)
                for place, each in enumerate(order):
                    self.sync(**each, delete=bool(place % 2) and "also" not in str(order))
                    found, now = world.found(), archive.files
                    for path, data in found.items():
                        if path in now and not path.endswith("Release.gpg"):
                            self.assertEqual(data, now[path], path)
                    self.assertTrue(set(archive.pool) <= found.keys())

    def test_each_hash_has_a_name(self) -> None:
        """With SHA-256 and SHA-512 an index has a name by either: apt asks for the latter."""
        self.make(Archive())
        told = self.archive.release_text

        def release_text(named: dict[str, bytes]) -> bytes:
            rows = (f" {sha512(d).hexdigest()} {len(d)} {p}\n" for p, d in named.items())
            return told(named) + f"SHA512:\n{''.join(rows)}".encode()

        self.archive.release_text = release_text  # type: ignore[assignment]
        old: dict[str, bytes] = {}
        for _ in range(3):
            self.archive.add()
            self.publish()
            self.sync(delete=True)
            found = self.world.found()
            names = {}
            for ending in (".xz", ".gz"):
                data = self.archive.files[f"{SUITE}/{BINARY}{ending}"]
                above = f"{SUITE}/main/binary-amd64/by-hash"
                names[f"{above}/SHA512/{sha512(data).hexdigest()}"] = data
                names[f"{above}/SHA256/{sha(data)}"] = data
            self.assertEqual({p: d for p, d in found.items() if "by-hash" in p}, {**old, **names})
            old = names

    def test_another_hash_that_is_wrong(self) -> None:
        """A name by a hash that the file does not have is not made; that is named."""
        self.make(Archive())
        data = self.archive.files[f"{SUITE}/{BINARY}.xz"]
        self.amend("SHA256:", f"SHA512:\n {'1' * 128} {len(data)} {BINARY}.xz\nSHA256:")
        outcome = self.sync()
        self.assertEqual(outcome.entries.skipped_files, 1)
        self.assertIn("sha512", outcome.entries.skipped[0])
        self.assertFalse([path for path in self.world.found() if "SHA512" in path])

    def test_named_twice(self) -> None:
        """Of a package that is named with two hashes what mirrors have is there; the other is named."""
        for wrong_first in (True, False):
            self.make(Archive())
            path = next(each for each in self.archive.pool if each.endswith(".deb"))
            data = self.archive.pool[path]
            wrong = f"Filename: {path}\nSize: {len(data)}\nSHA256: {'1' * 64}\n\n"
            new = "pool/main/n/n_1_amd64.deb"
            self.archive.pool[new] = data
            right = wrong.replace(path, new).replace("1" * 64, sha(data))
            self.amend_packages(wrong if wrong_first else right + wrong.replace(path, new))
            for _ in range(2):
                outcome = self.sync()
                self.assertEqual(outcome.report.failed_files, 0)
                self.assertEqual(outcome.entries.skipped_files, 1)
                self.assertIn("named twice", outcome.entries.skipped[0])
                self.assertEqual(self.world.found()[path], data)
                self.assertEqual(
                    self.world.found()[f"{SUITE}/Release"], self.archive.files[f"{SUITE}/Release"]
                )
            made = self.world.mirror()
            self.addCleanup(made.close)
            noted = {each.path: each.digest.hex() for each in read_manifest(made.destination)}
            self.assertEqual(noted[path], sha(data))

    def test_an_index_named_twice(self) -> None:
        """The release file names an index with two hashes: what mirrors have is published."""
        self.make(Archive())
        data = self.archive.files[f"{SUITE}/{BINARY}.xz"]
        self.amend("SHA256:\n", f"SHA256:\n {'1' * 64} {len(data)} {BINARY}.xz\n")
        outcome = self.sync()
        self.assertEqual(outcome.entries.skipped_files, 1)
        self.assertEqual(self.world.found()[f"{SUITE}/{BINARY}.xz"], data)

    def test_listed_and_missing_forms(self) -> None:
        """Of the forms that are listed one is enough, whichever it is."""
        for left in (".xz", ".gz", ""):
            self.make(Archive(by_hash=False))
            self.archive.files[f"{SUITE}/{BINARY}"] = self.archive.packages_text()
            for ending in {".xz", ".gz", ""} - {left}:
                del self.archive.files[f"{SUITE}/{BINARY}{ending}"]
            self.world.hosts[0].files = self.archive.files
            self.sync()
            self.assertEqual(check_readers(self.world.directory), 20, left)

    def test_keep_going(self) -> None:
        """One package is missing for ever: the option publishes the indexes, and the others are there."""
        self.make(Archive())
        self.sync()
        self.archive.add()
        gone = self.archive.add()
        self.publish()
        release = f"{SUITE}/Release"
        del self.archive.files[gone]
        outcome = self.sync(delete=True)
        self.assertFalse(outcome.is_published)
        self.assertNotEqual(self.world.found()[release], self.archive.files[release])
        with patch("tests.mirror.test_debian.DebianArchive.sync", _keep_going):
            outcome = self.sync(delete=True)
        self.assertTrue(outcome.is_published)
        self.assertEqual([path for path, _ in outcome.report.failed], [gone])
        self.assertEqual(outcome.removed, [])
        found = self.world.found()
        self.assertEqual(found[release], self.archive.files[release])
        self.assertEqual(
            self.archive.pool.keys() - found.keys() - {gone},
            {each for each in self.archive.pool if "/s/" in each},
        )

    def test_keep_going_with_nobody(self) -> None:
        """If no mirror is left to ask, nothing is published: that is no package that is missing for ever."""
        self.make(Archive())
        self.sync()
        self.archive.add()
        self.publish()
        self.world.hosts[0].answer = partial(_refuse_some, (".deb",), 503)
        with patch("tests.mirror.test_debian.DebianArchive.sync", _keep_going):
            outcome = self.sync()
        self.assertFalse(outcome.is_published)

    def test_dates(self) -> None:
        """One in ISO form or with Chinese months counts; one that is none does if dates are ignored."""
        for number, form in enumerate(("2026-02-28T12:10:00Z", "六, 28 2月 2026 12:10:00 UTC")):
            self.make(Archive())
            date = f"{self.archive.date:%a, %d %b %Y}"
            self.assertIn("28 Feb 2026", date)
            self.world.hosts[0].files = self.archive.files
            text = self.archive.files[f"{SUITE}/Release"].decode()
            line = next(each for each in text.splitlines() if each.startswith("Date:"))
            self.archive.files[f"{SUITE}/Release"] = text.replace(line, f"Date: {form}").encode()
            self.sync()
            self.assertEqual(check_readers(self.world.directory), 40, number)
            self.archive.files[f"{SUITE}/Release"] = text.replace(
                line, "Date: Sa, 28 Dez 2026 12:00:00 UTC"
            ).encode()
            self.refused("--ignore-dates mirrors it nevertheless")
            self.sync(ignores_dates=True)

    def test_weak_patches(self) -> None:
        """A list of patches with SHA-1 alone is left out, and named; all else is there."""
        self.make(Archive())
        self.archive.further[f"{BINARY}.diff/Index"] = f"SHA1-Current: {'1' * 40} 1\n".encode()
        self.publish()
        outcome = self.sync(with_patches=True)
        self.assertEqual(outcome.entries.skipped_files, 1)
        self.assertIn("not an index of patches with SHA-256", outcome.entries.skipped[0])
        self.assertEqual(check_readers(self.world.directory), 40)
        self.assertFalse([path for path in self.world.found() if ".diff/" in path])


_sync = DebianCase.sync.__globals__["DebianArchive"].sync


def _keep_going(archive: Any, delete: bool, dry_run: bool) -> Any:
    return _sync(archive, delete, dry_run, keep_going=True)


class RpmTests(RpmCase):
    """RPM repositories."""

    def test_any_refusal(self) -> None:
        """A signature that need not be there may be refused with any status; what must be is told of."""
        for status in (400, 401, 403, 404, 410, 500):
            world = self.make(RpmArchive())
            world.hosts[0].answer = partial(_refuse_some, (".asc",), status)
            self.sync()
            self.assertEqual(world.found(), self.archive.files)
            world.hosts[0].answer = partial(_refuse_some, ("",), status)
            self.refused(f"answers {status}")

    def test_sizes_that_are_not_told(self) -> None:
        """The hash alone proves a file; the manifest has what it is."""
        self.make(RpmArchive(count=3))
        files = self.archive.files
        path = self.archive.primary_path
        text = files[REPOMD].decode()
        size = f"<size>{len(files[path])}</size>"
        self.assertIn(size, text)
        files[REPOMD] = text.replace(size, "").encode()
        self.sync()
        self.assertEqual(self.world.found(), files)
        made = self.world.mirror()
        self.addCleanup(made.close)
        noted = {each.path: each.size for each in read_manifest(made.destination)}
        self.assertEqual(noted[path], len(files[path]))

    def test_packages_without_sizes(self) -> None:
        """The same of packages."""
        archive = RpmArchive(count=2)
        told = archive.primary
        archive.primary = lambda: told().replace(b"<size package", b"<size other")  # type: ignore[method-assign]
        archive.publish()
        self.make(archive)
        self.sync()
        self.assertEqual(self.world.found(), archive.files)
        made = self.world.mirror()
        self.addCleanup(made.close)
        for each in read_manifest(made.destination):
            self.assertEqual(each.size, len(archive.files[each.path]))

    def test_needless_parts(self) -> None:
        """Slashes and dots that lead nowhere, blanks, the same package twice."""
        archive = RpmArchive(count=2)
        made = archive.add("a b", path=".//Packages/./a b.rpm")
        archive.packages.append(made)
        archive.publish()
        archive.files["Packages/a b.rpm"] = archive.files.pop(made.path)
        self.make(archive)
        outcome = self.sync()
        self.assertEqual(self.world.found(), archive.files)
        self.assertEqual(outcome.entries.skipped_files, 0)

    def test_what_cannot_be_used(self) -> None:
        """Weak hashes of packages and of further indexes are named; what is proven is there."""
        archive = RpmArchive(count=2)
        archive.add("weak", kind="sha", checksum="1" * 40)
        archive.data_xml = (
            '<data type="extra"><checksum type="sha">' + "1" * 40 + "</checksum>"
            '<location href="repodata/extra.xml"/><size>3</size></data>'
        )
        archive.publish()
        self.make(archive)
        outcome = self.sync()
        self.assertEqual(outcome.entries.skipped_files, 2)
        self.assertEqual(outcome.report.failed_files, 0)
        self.assertEqual(self.world.found()[REPOMD], archive.files[REPOMD])

    def test_named_twice(self) -> None:
        """Of a package with two hashes what the mirror has is there."""
        archive = RpmArchive(count=2)
        good = archive.packages[0]
        wrong = archive.add("p0", path=good.path, checksum="1" * 64, size=len(good.data))
        archive.packages.remove(wrong)
        archive.packages.insert(0, wrong)
        archive.publish()
        archive.files[good.path] = good.data
        self.make(archive)
        outcome = self.sync()
        self.assertEqual(outcome.report.failed_files, 0)
        self.assertEqual(outcome.entries.skipped_files, 1)
        self.assertEqual(self.world.found(), archive.files)

    def test_keep_going(self) -> None:
        """A package and a further index that are missing for ever: all else is published."""
        archive = RpmArchive(count=3)
        self.make(archive)
        gone = archive.packages[0].path
        del archive.files[gone]
        self.assertFalse(self.sync().is_published)
        self.assertNotIn(REPOMD, self.world.found())
        self.make(archive)
        group = next(path for path in archive.files if "-group" in path)
        del archive.files[group]
        self.assertRaises(MirrorError, self.sync)
        sync = RpmCase.sync.__globals__["RpmRepository"].sync
        with patch(
            "tests.mirror.test_rpm.RpmRepository.sync",
            lambda archive, delete, dry_run: sync(archive, delete, dry_run, keep_going=True),
        ):
            outcome = self.sync(delete=True)
        self.assertTrue(outcome.is_published)
        self.assertEqual(outcome.lacking, [group])
        self.assertEqual(self.world.found(), archive.files)
        self.assertTrue(os.path.exists(self.world.directory / REPOMD))
