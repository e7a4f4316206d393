"""Debian archives in virtual time: what is kept, in which order it is seen, and what is refused."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.mirror import (
    debian_archive,
    debian_index_selection,
    debian_metadata,
    decompression,
    mirror_api,
)
from pipegrid.mirror.archive_file import BadEntry, MirrorError
from pipegrid.mirror.debian_archive import DebianArchive, DebianOutcome
from pipegrid.mirror.debian_index_selection import Selection
from pipegrid.mirror.decompression import unpacked
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.signatures import Keys
from pipegrid.testing.network import leaks, run
from tests.mirror.archive import BINARY, NOW, SOURCES, SUITE, Archive, Signer, check_readers, sha
from tests.mirror.world import MirrorWorld, as_written, ok

HIDDEN = ".pipegrid-mirror"
UNSIGNED = Keys(allow_unsigned=True)
BOTH: dict[str, Any] = {"with_sources": True}


class DebianCase(SynchronousTestCase):
    """An archive, its mirrors, and a directory."""

    def make(self, archive: Archive, hosts: int = 1, **options: Any) -> MirrorWorld:
        """Begin anew."""
        self.archive = archive
        self.world = MirrorWorld(self.mktemp(), archive.files, hosts, **options)
        return self.world

    def publish(self, *numbers: int) -> None:
        """Mirrors have what the archive has now; all, or these."""
        self.archive.publish()
        for number, host in enumerate(self.world.hosts):
            if not numbers or number in numbers:
                host.files = self.archive.files

    def sync(
        self,
        keys: Keys = UNSIGNED,
        delete: bool = False,
        dry_run: bool = False,
        now: datetime = NOW,
        ignores_dates: bool = False,
        mirror: dict[str, Any] | None = None,
        **selection: Any,
    ) -> DebianOutcome:
        """Bring it up to date; nothing may be left afterwards."""
        world = self.world
        for host in world.hosts:
            host.requests.clear()
        made = world.mirror(dry_run=dry_run, **(mirror or {}))
        try:
            chosen = Selection(**{"suites": ("sid",), "components": ("main",), **selection})
            archive = DebianArchive(made, chosen, keys, now, ignores_dates)
            outcome: DebianOutcome = run(
                world.clock,
                Deferred.fromCoroutine(archive.sync(delete, dry_run)),
                limit_s=3600,
                network=world.network,
            )
        finally:
            run(world.clock, made.close(), network=world.network)
        world.clock.advance(10)
        left = leaks(world.clock, world.network)
        assert not left, left
        return outcome

    def expected(self, *indexes: str, by_hash: bool = True) -> dict[str, bytes]:
        """What should be there of the archive as it is now."""
        files = self.archive.files
        found = {path: data for path, data in files.items() if path.startswith("pool/main/p/")}
        for index in indexes:
            found[f"{SUITE}/{index}"] = data = files[f"{SUITE}/{index}"]
            if by_hash:
                found[f"{SUITE}/{os.path.dirname(index)}/by-hash/SHA256/{sha(data)}"] = data
        for name in ("Release", "Release.gpg", "InRelease"):
            if f"{SUITE}/{name}" in files:
                found[f"{SUITE}/{name}"] = files[f"{SUITE}/{name}"]
        return found

    def skips(self, words: str, **options: Any) -> None:
        """Look that an entry is skipped, named and counted, and that all others are there and to be seen."""
        outcome = self.sync(delete=True, **options)
        self.assertEqual(outcome.entries.skipped_files, 1)
        self.assertIn(words, outcome.entries.skipped[0])
        self.assertNotIn("\n", outcome.entries.skipped[0])
        self.assertEqual(outcome.removed, [])  # not after a run of which something was skipped
        found = self.world.found()
        packages = [each for each in self.archive.pool if each.endswith(".deb")]
        self.assertEqual(
            {each: found.get(each) for each in packages},
            {each: self.archive.pool[each] for each in packages},
        )
        for name in ("Release", "InRelease"):
            path = f"{SUITE}/{name}"
            self.assertEqual(found.get(path), self.archive.files.get(path))

    def refused(self, words: str, *, error: type[Exception] = MirrorError, **options: Any) -> None:
        """Look that a run ends in one sentence, and that nothing that can be seen has changed."""
        before = self.world.found()
        found = self.assertRaises(error, self.sync, **options)
        self.assertIn(words, str(found))
        self.assertNotIn("\n", str(found))
        self.assertEqual(self.world.found(), before)


class OrdinaryTests(DebianCase):
    """Nothing goes wrong."""

    def test_all_of_it(self) -> None:
        """Packages, both forms of the index, release file; each once. A second run asks only for the last."""
        world = self.make(Archive())
        outcome = self.sync()
        self.assertEqual(world.found(), self.expected(BINARY + ".xz", BINARY + ".gz"))
        self.assertEqual(outcome.report.fetched_files, 20)
        self.assertEqual(set(world.hosts[0].requests.values()), {1})
        self.assertEqual(check_readers(world.directory), 40)
        self.sync()
        self.assertEqual(
            set(world.hosts[0].requests),
            {f"{SUITE}/{name}" for name in ("InRelease", "Release", "Release.gpg")},
        )
        self.assertEqual(os.listdir(world.directory / HIDDEN / "incoming"), [])

    def test_release_files_that_are_the_same(self) -> None:
        """They stay as old as they are: readers ask whether they have changed since."""
        world = self.make(Archive())
        self.sync()
        path = world.directory / SUITE / "Release"
        before = as_written(path)
        self.sync()
        self.assertEqual(as_written(path), before)
        path.write_bytes(b"x" * path.stat().st_size)
        self.sync()
        self.assertEqual(path.read_bytes(), self.archive.files[f"{SUITE}/Release"])

    def test_round_trips(self) -> None:
        """An unchanged archive costs two: a connection, and the release files."""
        world = self.make(Archive())
        self.sync()
        began_s = world.clock.seconds()
        archive = self.sync()
        self.assertEqual(archive.report.fetched_files, 0)
        # 10 ms there, 10 ms back; ``sync`` itself lets 10 s go by at the end.
        self.assertLess(world.clock.seconds() - began_s - 10, 2.5 * 0.02)

    def test_sources_and_others(self) -> None:
        """Sources if asked for, and whatever else the release file names."""
        archive = Archive()
        archive.further = {
            "main/i18n/Translation-en": b"unpacked",
            "main/i18n/Translation-en.xz": lzma.compress(b"unpacked"),
            "main/Contents-amd64.gz": b"contents",
            "main/Contents-i386.gz": b"contents",
        }
        archive.publish()
        del archive.files[f"{SUITE}/main/i18n/Translation-en"]
        world = self.make(archive)
        outcome = self.sync(also=("main/i18n/*", "*/Contents-amd64*", "main/none*"), **BOTH)
        found = world.found()
        self.assertEqual({p for p in found if p.startswith("pool")}, set(archive.pool))
        self.assertIn(f"{SUITE}/{SOURCES}.xz", found)
        self.assertIn(f"{SUITE}/main/i18n/Translation-en.xz", found)
        self.assertIn(f"{SUITE}/main/Contents-amd64.gz", found)
        self.assertNotIn(f"{SUITE}/main/Contents-i386.gz", found)
        self.assertEqual(outcome.lacking, [])
        del archive.files[f"{SUITE}/main/Contents-i386.gz"]
        for path in [path for path in archive.files if "by-hash" in path]:
            del archive.files[path]
        world = self.make(archive)
        outcome = self.sync(also=("*/Contents-*",))
        self.assertEqual(outcome.lacking, [f"{SUITE}/main/Contents-i386.gz"])
        self.assertIn(f"{SUITE}/main/Contents-amd64.gz", world.found())

    def test_a_new_generation(self) -> None:
        """
        What is new is fetched. What is not named any more goes if asked, a generation later, with the
        names by hash of the indexes that name it.
        """
        world = self.make(Archive())
        self.sync()
        first = self.archive.files
        gone = next(iter(self.archive.pool))
        self.archive.drop(gone)
        new = self.archive.add()
        self.publish()
        outcome = self.sync(delete=True, dry_run=True)
        self.assertEqual(outcome.removed, [])
        self.assertEqual(outcome.report.fetched_files, 1)
        self.assertNotIn(new, world.found())
        self.assertIn(gone, world.found())
        outcome = self.sync(delete=True)
        self.assertEqual(outcome.removed, [])
        kept = world.found()
        self.assertEqual(kept.pop(gone), first[gone])
        self.assertIn(new, kept)
        old = [p for p in kept if "by-hash" in p and p in first]
        self.assertEqual(len(old), 2)
        self.assertEqual(
            {p: d for p, d in kept.items() if p not in old},
            self.expected(BINARY + ".xz", BINARY + ".gz"),
        )
        self.archive.add()
        self.publish()
        outcome = self.sync(delete=True, dry_run=True)
        self.assertEqual(sorted(outcome.removed), sorted([*old, gone]))
        outcome = self.sync(delete=True)
        self.assertEqual(sorted(outcome.removed), sorted([*old, gone]))
        check_readers(world.directory)

    def test_verify(self) -> None:
        """All that is kept can be verified, indexes and release files too."""
        world = self.make(Archive())
        self.sync()
        for path in (f"{SUITE}/{BINARY}.gz", f"{SUITE}/Release", min(self.archive.pool)):
            original = (world.directory / path).read_bytes()
            for data, wrong in ((b"x" * len(original), 1), (original, 0)):
                (world.directory / path).write_bytes(data)
                mirror = world.mirror()
                report = run(world.clock, mirror.verify(), network=world.network)
                run(world.clock, mirror.close(), network=world.network)
                self.assertEqual((report.failed_files, report.wanted_files), (wrong, 23), path)

    def test_who_is_busy_or_elsewhere(self) -> None:
        """A release file is asked for again of a mirror that is busy; a redirect is followed."""
        world = self.make(Archive())
        count = 0

        def busy(path: str) -> bytes | None:
            nonlocal count
            count += 1
            return ok(b"", b"Retry-After: 3", status=b"429 Slow") if count < 7 else None

        world.hosts[0].answer = busy
        began_s = world.clock.seconds()
        self.sync()
        self.assertGreater(world.clock.seconds() - began_s, 8)
        world.hosts[0].answer = lambda path: ok(
            b"", b"Location: https://b.example/debian/" + path.encode(), status=b"301 Moved"
        )
        self.refused("https://b.example/: No connection to b.example could be used")

    def test_a_snapshot_of_hard_links(self) -> None:
        """No file is changed in its place: a copy that shares them (``cp -al``) stays as it is."""
        for form in ("packed", "unpacked", "zstd"):
            world = self.make(Archive(patches=True, filler=200))
            self.sync(indexes=form)
            snapshot = Path(self.mktemp())
            for path in world.found():
                (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
                os.link(world.directory / path, snapshot / path)
            before = {path: (snapshot / path).read_bytes() for path in world.found()}
            self.archive.drop(min(self.archive.pool))
            changed = max(path for path in self.archive.pool if path.endswith(".deb"))
            self.archive.pool[changed] += b"more"
            self.publish()
            self.sync(indexes=form, delete=True)
            self.assertNotEqual(world.found()[changed], before[changed])
            for path, data in before.items():
                self.assertEqual((snapshot / path).read_bytes(), data, path)

    def test_one_form_only(self) -> None:
        """A form that the release file names and nobody has is left out; an old one does not stay."""
        world = self.make(Archive(by_hash=False))
        self.sync()
        self.archive.add()
        self.publish()
        del self.archive.files[f"{SUITE}/{BINARY}.gz"]
        outcome = self.sync()
        self.assertEqual(outcome.lacking, [f"{SUITE}/{BINARY}.gz"])
        self.assertEqual(world.found(), self.expected(BINARY + ".xz", by_hash=False))

    def test_cut_off_while_the_form_changes(self) -> None:
        """After each step readers find what the release file that they see says; the next run ends it."""
        world = self.make(Archive())
        release, cut = Destination.release, 0

        def release_some(destination: Destination, paths: Iterable[str]) -> None:
            for number, path in enumerate(paths):
                if number == cut:
                    raise MirrorError("cut off")
                release(destination, [path])

        for before, after, forms in (("packed", "unpacked", 1), ("unpacked", "packed", 2)):
            for number in range(forms + 1):  # and a release file
                cut = number
                self.sync(indexes=before, delete=True)
                self.archive.add()
                self.publish()
                self.patch(Destination, "release", release_some)
                self.assertRaises(MirrorError, self.sync, indexes=after)
                self.patch(Destination, "release", release)
                check_readers(world.directory)
                self.sync(indexes=after)
                count = len([path for path in world.found() if path.startswith("pool/")])
                self.assertEqual(check_readers(world.directory), count * forms)

    def test_without_names_by_hash(self) -> None:
        """A mirror that has less than the release file says is asked by the plain name."""
        world = self.make(Archive())
        for path in [path for path in self.archive.files if "by-hash" in path]:
            del self.archive.files[path]
        world.hosts[0].files = self.archive.files
        self.sync()
        self.assertEqual(world.found(), self.expected(BINARY + ".xz", BINARY + ".gz"))

    def test_signed(self) -> None:
        """By a key that is known; the second mirror if the first offers something else."""
        signer, other = Signer(), Signer()
        self.addCleanup(signer.close)
        self.addCleanup(other.close)
        world = self.make(Archive(signer), hosts=2)
        world.hosts[0].files = Archive(other, seed=2).files
        self.sync(Keys((signer.keyring,)))
        self.assertEqual(world.found(), self.expected(BINARY + ".xz", BINARY + ".gz"))

    def test_release_files_of_two_generations(self) -> None:
        """If a mirror changes between two requests, only what says the same is published."""
        signer = Signer()
        self.addCleanup(signer.close)
        world = self.make(Archive(signer))
        old = self.archive.files
        self.archive.add()
        self.archive.publish()
        for name in ("Release", "Release.gpg"):
            mixed = {**self.archive.files, f"{SUITE}/{name}": old[f"{SUITE}/{name}"]}
            world.hosts[0].files = mixed
            self.sync(Keys((signer.keyring,)))
            found = world.found()
            self.assertEqual(found[f"{SUITE}/InRelease"], mixed[f"{SUITE}/InRelease"])
            self.assertNotIn(f"{SUITE}/Release", found)
            self.assertNotIn(f"{SUITE}/Release.gpg", found)
        # In two files only.
        files = dict(self.archive.files)
        del files[f"{SUITE}/InRelease"]
        world.hosts[0].files = files
        self.sync(Keys((signer.keyring,)))
        self.assertIn(f"{SUITE}/Release.gpg", world.found())
        self.assertNotIn(f"{SUITE}/InRelease", world.found())
        del files[f"{SUITE}/Release.gpg"]
        self.refused("Release of http://m0/archive is not signed", keys=Keys((signer.keyring,)))


class PublicationTests(DebianCase):
    """A reader never sees an index that names what is not there."""

    def watching(self, check: Callable[[], None]) -> ExitStack:
        """Call this after whatever changes a name, for a while."""
        stack = ExitStack()
        for name in ("rename", "unlink", "link"):
            real = getattr(os, name)

            def watched(*args: Any, real: Any = real, **kwargs: Any) -> None:
                real(*args, **kwargs)
                check()

            stack.enter_context(patch.object(os, name, watched))
        return stack

    def test_every_step(self) -> None:
        """Looked at after every change of a name, through generations that add and remove packages."""
        for options in ({}, {"indexes": "unpacked"}, {"delete": True}, {"with_patches": True}):
            rng = random.Random(3)
            world = self.make(Archive(patches=True, filler=200))
            looks = 0

            def check(world: MirrorWorld = world) -> None:
                nonlocal looks
                looks += 1
                check_readers(world.directory)

            with self.watching(check):
                for _ in range(4):
                    self.sync(**options)
                    for path in rng.sample(sorted(self.archive.pool), 3):
                        self.archive.drop(path)
                    self.archive.add()
                    self.publish()
            self.assertGreater(looks, 50)

    def test_every_deletion(self) -> None:
        """What an index of before names goes behind it, by whatever name that can be seen."""

        def check(world: MirrorWorld) -> None:
            check_readers(world.directory)

        for forms in (("packed",) * 4, ("packed", "unpacked"), ("unpacked", "packed")):
            world = self.make(Archive(patches=True, filler=200))
            for form in forms:
                with self.watching(partial(check, world)):
                    self.sync(indexes=form, delete=True)
                self.archive.drop(min(self.archive.pool))
                self.archive.add()
                self.publish()

    def test_no_names_by_hash(self) -> None:
        """For a disk that fails nothing is published; where a file has no two names, all but these is."""
        for name, number in (
            ("link", errno.ENOSPC),
            ("link", errno.EIO),
            ("rename", errno.EACCES),
            ("link", errno.EPERM),
        ):
            world = self.make(Archive())
            real = getattr(os, name)

            def failing(*args: Any, real: Any = real, number: int = number, **kwargs: Any) -> None:
                if "link.new" in args:
                    raise OSError(number, os.strerror(number))
                real(*args, **kwargs)

            with patch.object(os, name, failing):
                if number == errno.EPERM:
                    self.sync()
                else:
                    said = str(self.assertRaises(MirrorError, self.sync))
                    self.assertIn("by-hash", said)
            published = any("elease" in path for path in world.found())
            self.assertEqual(published, number == errno.EPERM)
            self.sync()
            self.assertEqual(world.found(), self.expected(BINARY + ".xz", BINARY + ".gz"))

    def test_what_failed(self) -> None:
        """A package that nobody has: the old indexes stay, whatever else has come; nothing is deleted."""
        world = self.make(Archive())
        self.sync()
        before = world.found()
        gone = next(iter(self.archive.pool))
        self.archive.drop(gone)
        new, lost = self.archive.add(), self.archive.add()
        self.publish()
        data = self.archive.files.pop(lost)
        outcome = self.sync(delete=True)
        self.assertEqual(outcome.report.failed_files, 1)
        self.assertEqual(world.found(), {**before, new: self.archive.files[new]})
        # The next run goes on: the index that is there, unseen, is not fetched again.
        self.archive.files[lost] = data
        self.sync()
        self.assertEqual({p for p in world.hosts[0].requests if "elease" not in p}, {lost})
        self.assertEqual(check_readers(world.directory), 2 * 21)

    def test_what_a_killed_run_left(self) -> None:
        """Packages that had come and had no name yet are taken up, though indexes are looked for first."""
        world = self.make(Archive())
        path = max(self.archive.pool, key=lambda each: len(self.archive.pool[each]))
        data = self.archive.pool[path]
        incoming = world.directory / HIDDEN / "incoming"
        incoming.mkdir(parents=True)
        (incoming / f"{sha(data)}.1").write_bytes(data)
        order: list[str] = []
        fsync, release = os.fsync, Destination.release

        def synced(fd: int) -> None:
            fsync(fd)
            order.append(os.readlink(f"/proc/self/fd/{fd}"))

        def released(*args: Any) -> None:
            order.append("seen")
            release(*args)

        with patch.object(os, "fsync", synced), patch.object(Destination, "release", released):
            self.sync()
        above = str((world.directory / path).parent.absolute())
        self.assertLess(
            order.index(above), order.index("seen")
        )  # no power cut takes its name alone
        self.assertNotIn(path, world.hosts[0].requests)
        self.assertEqual(world.found()[path], data)
        self.assertEqual(list(incoming.iterdir()), [])

    def test_what_cannot_be_removed(self) -> None:
        """An index that a failed run left, of another generation, and that stays: one sentence says so."""
        world = self.make(Archive())
        self.sync()
        path = self.archive.add()
        self.publish()
        del self.archive.files[path]
        self.sync()  # fails; the new index is staged
        self.archive.drop(path)
        self.publish()
        broken = OSError(errno.EACCES, os.strerror(errno.EACCES))
        with patch.object(os, "unlink", side_effect=broken):
            found = self.assertRaises(MirrorError, self.sync)
        self.assertIn("cannot remove '.pipegrid-mirror/staged/", str(found))
        check_readers(world.directory)

    def test_what_was_staged_before(self) -> None:
        """An index left by a run that failed is not taken for that of the next one."""
        for form in ("packed", "unpacked"):
            world = self.make(Archive())
            self.sync(indexes=form)
            path = self.archive.add()
            self.publish()
            del self.archive.files[path]
            self.sync(indexes=form)  # fails; the new index is staged
            self.archive.drop(path)
            self.publish()  # and withdrawn: the contents of the first generation, newer
            outcome = self.sync(indexes=form)
            self.assertEqual(outcome.report.failed_files, 0)
            self.assertEqual(check_readers(world.directory) % 20, 0)
            name = BINARY if form == "unpacked" else BINARY + ".xz"
            data = (world.directory / SUITE / name).read_bytes()
            self.assertNotIn(path.encode(), data if form == "unpacked" else lzma.decompress(data))
            staged = world.directory / HIDDEN / "staged"
            self.assertEqual([path for path in staged.rglob("*") if path.is_file()], [])


class PatchTests(DebianCase):
    """Unpacked indexes, and patches."""

    def start(self, **options: Any) -> MirrorWorld:
        """An archive with large indexes, mirrored once."""
        world = self.make(Archive(**{"patches": True, "filler": 4000, "count": 30, **options}))
        self.sync(indexes="unpacked", **BOTH)
        return world

    def advance(self, times: int = 3) -> None:
        """A few generations more, each with a new package and source."""
        for _ in range(times):
            self.archive.add()
            self.archive.add_source()
            self.publish()

    def check(self) -> None:
        """The unpacked indexes are what the archive has."""
        for base, text in (
            (BINARY, self.archive.packages_text()),
            (SOURCES, self.archive.sources_text()),
        ):
            self.assertEqual((self.world.directory / SUITE / base).read_bytes(), text)
        self.assertEqual(
            check_readers(self.world.directory),
            len([path for path in self.archive.pool if path.endswith(".deb")]),
        )

    def asked(self, words: str) -> int:
        """How many of the requests have this in them."""
        return sum(count for path, count in self.world.hosts[0].requests.items() if words in path)

    def test_patched(self) -> None:
        """Only patches are fetched, of all indexes at once: a fifth of the bytes of the indexes at most."""
        world = self.start()
        self.assertEqual(self.asked(".gz") + self.asked("SHA256"), 2)
        self.check()
        self.assertFalse((world.directory / SUITE / f"{BINARY}.xz").exists())
        self.advance()
        outcome = self.sync(indexes="unpacked", **BOTH)
        self.check()
        self.assertEqual(outcome.patched, 2)
        self.assertEqual(self.asked("Packages.diff/2026"), 3)
        self.assertEqual(self.asked("Sources.diff/2026"), 3)
        full = sum(len(self.archive.files[f"{SUITE}/{base}.xz"]) for base in (BINARY, SOURCES))
        self.assertLess(5 * outcome.index_bytes, full)
        again = self.sync(indexes="unpacked", **BOTH)
        self.assertEqual((again.index_bytes, again.patched), (0, 0))

    def test_time(self) -> None:
        """At 20 ms, for an index that takes a second, a fifth of the time of fetching it."""
        times = {}
        for form in ("packed", "unpacked"):
            # 0.1 MB at 0.1 MB/s, instead of 10 MB at 10 MB/s.
            world = self.make(
                Archive(patches=True, filler=4000, count=60), latency_s=0.01, bytes_per_s=100_000
            )
            self.sync(indexes=form)
            self.archive.add()
            self.archive.pool[list(self.archive.pool)[-1]] = b"small"
            self.publish()
            del self.archive.files[f"{SUITE}/{BINARY}.gz"]  # the one form would take as long again
            began_s = world.clock.seconds()
            self.sync(indexes=form)
            times[form] = world.clock.seconds() - began_s - 10  # which ``sync`` waits at the end
        self.assertLess(5 * times["unpacked"], times["packed"], times)

    def test_merged(self) -> None:
        """Archives that merge patches themselves: one for each index."""
        self.start(merged=True)
        self.advance()
        outcome = self.sync(indexes="unpacked", **BOTH)
        self.check()
        self.assertEqual(outcome.patched, 2)
        self.assertEqual(self.asked("Packages.diff/2026"), 1)

    def test_from_packed(self) -> None:
        """Whoever kept the index packed can change over by patches, too."""
        world = self.make(Archive(patches=True, filler=4000, count=60))
        self.sync(**BOTH)
        self.advance()
        outcome = self.sync(indexes="unpacked", **BOTH)
        self.assertEqual(outcome.patched, 2)
        self.check()
        self.assertFalse((world.directory / SUITE / f"{BINARY}.xz").exists())
        self.sync(**BOTH)
        self.assertFalse((world.directory / SUITE / BINARY).exists())
        check_readers(world.directory)

    def test_compressed(self) -> None:
        """Indexes compressed here: patched as well, and made anew if they have changed."""
        world = self.make(Archive(patches=True, filler=4000, count=60))
        path = world.directory / SUITE / f"{BINARY}.zst"

        def check(patched: int) -> None:
            outcome = self.sync(indexes="zstd", delete=True)
            self.assertEqual(outcome.patched, patched)
            data = b"".join(unpacked(str(path)))
            self.assertEqual(data, self.archive.packages_text())
            self.assertLess(path.stat().st_size, 0.7 * len(data))
            for ending in ("", ".xz", ".gz"):
                self.assertFalse(path.with_suffix(ending).exists())

        check(0)
        for _ in range(3):
            self.archive.add()
            self.publish()
            check(1)
        check(0)
        self.assertEqual(self.asked("Packages") + self.asked("SHA256"), 0)
        path.write_bytes(b"x" * path.stat().st_size)
        check(0)
        self.assertEqual(self.asked("SHA256"), 1)
        mirror = world.mirror()
        report = run(world.clock, mirror.verify(), network=world.network)
        run(world.clock, mirror.close(), network=world.network)
        self.assertEqual(report.failed_files, 0)
        (world.directory / HIDDEN / "compressed").write_bytes(b"dam\xffaged\n")
        check(0)
        self.assertEqual(self.asked("SHA256"), 1)
        # And back, without what is not kept any more.
        self.archive.add()
        self.publish()
        self.assertEqual(self.sync(indexes="unpacked").patched, 1)
        self.assertFalse(path.exists())
        self.archive.add()
        self.publish()
        check(1)
        self.sync()
        self.assertFalse(path.exists())
        self.assertEqual(check_readers(world.directory), 2 * 65)

    def test_broken_chains(self) -> None:
        """A patch or a list that is missing or wrong, an unknown version: the packed index is fetched."""

        def lacking(files: dict[str, bytes]) -> None:
            del files[next(p for p in files if "Packages.diff/2026" in p)]

        def garbled(files: dict[str, bytes]) -> None:
            path = next(p for p in files if "Packages.diff/2026" in p)
            files[path] = files[path][:-1] + b"?"

        def no_list(files: dict[str, bytes]) -> None:
            for path in [p for p in files if p.endswith("Packages.diff/Index")]:
                del files[path]
            for path in [p for p in files if "Packages.diff/by-hash" in p]:
                del files[path]

        for spoil in (lacking, garbled, no_list):
            self.start()
            self.advance()
            files = dict(self.archive.files)
            spoil(files)
            self.world.hosts[0].files = files
            outcome = self.sync(indexes="unpacked", **BOTH)
            self.assertEqual(outcome.patched, 1, spoil.__name__)
            self.check()
        # Patches whose hashes are right, and which lead elsewhere.
        self.start()
        self.archive.history[BINARY][-1] += b"Package: other\n"
        self.advance()
        outcome = self.sync(indexes="unpacked", **BOTH)
        self.check()
        self.assertEqual(outcome.patched, 1)
        # A version that the archive has forgotten.
        self.start()
        self.advance(1)
        del self.archive.history[BINARY][:2]
        self.advance()
        outcome = self.sync(indexes="unpacked", **BOTH)
        self.check()
        self.assertEqual(outcome.patched, 1)

    def test_not_worth_it(self) -> None:
        """Patches that are larger than the packed index are not asked for."""
        self.start(filler=0)
        for path in list(self.archive.pool)[::2]:
            self.archive.drop(path)
        self.advance(30)
        outcome = self.sync(indexes="unpacked", **BOTH)
        self.assertEqual((outcome.patched, self.asked("Packages.diff/2026")), (0, 0))
        self.check()

    def test_for_readers(self) -> None:
        """Patches are kept as the archive has them, if asked for; those that it dropped go."""
        world = self.start()
        self.advance()
        self.sync(indexes="unpacked", with_patches=True, **BOTH)
        there = {p for p in self.archive.files if ".diff/" in p and "by-hash" not in p}
        self.assertEqual({p for p in world.found() if ".diff/" in p and "by-hash" not in p}, there)
        self.check()
        for path in there:
            self.assertEqual((world.directory / path).read_bytes(), self.archive.files[path])
        self.assertEqual(self.asked("Packages.diff/2026"), 3)
        del self.archive.history[BINARY][0]
        self.advance(1)
        self.sync(with_patches=True, delete=True, **BOTH)
        there = {p for p in self.archive.files if ".diff/" in p and "by-hash" not in p}
        self.assertEqual({p for p in world.found() if ".diff/" in p and "by-hash" not in p}, there)

    def test_a_bomb(self) -> None:
        """A packed index that unpacks to more than the release file says is given up at that size."""
        archive = Archive(by_hash=False)
        bomb = gzip.compress(bytes(64 << 20))
        for named in (True, False):
            archive.publish()
            release = archive.release_text(
                {BINARY + ".gz": bomb, **({BINARY: b"small"} if named else {})}
            )
            archive.files = {f"{SUITE}/Release": release, f"{SUITE}/{BINARY}.gz": bomb}
            self.make(archive)
            self.patch(decompression, "MAX_INDEX_BYTES", 1 << 20)
            self.refused("bytes, unpacked", error=BadEntry)
            if named:
                self.refused("more than 5 bytes", indexes="unpacked", error=Exception)


class RefusalTests(DebianCase):
    """Bad input: one sentence each, and nothing wrong is ever seen."""

    def test_release_files(self) -> None:
        """Unsigned, stale, older than ours, no release file at all."""
        signer = Signer()
        self.addCleanup(signer.close)
        keys = Keys((signer.keyring,))
        world = self.make(Archive(signer))
        first = self.archive.files
        self.sync(keys)
        self.archive.add()
        self.publish()
        self.sync(keys)
        world.hosts[0].files = first
        self.refused("older than the existing one", keys=keys)
        world.hosts[0].files = self.archive.files
        self.refused("is stale: it was valid until", keys=keys, now=NOW + timedelta(days=30))
        changed = dict(self.archive.files)
        changed[f"{SUITE}/InRelease"] = changed[f"{SUITE}/InRelease"].replace(b"Test", b"Tess")
        world.hosts[0].files = changed
        self.refused("the signature does not fit it", keys=keys)
        self.refused("give --keyring, or --allow-unsigned", keys=Keys())
        world.hosts[0].files = Archive().files
        self.refused("is not signed", keys=keys)
        world.hosts[0].answer = lambda path: ok(b"<html>Please log in</html>")
        self.refused("not signed at all", keys=keys)
        self.refused("answers every request with a web page")
        world.hosts[0].answer = lambda path: (
            b"HTTP/1.1 302 Found\r\nLocation: http://other/\r\nContent-Length: 0\r\n\r\n"
        )
        self.refused("http://other/: No connection to other could be used", keys=keys)
        world.hosts[0].answer = lambda path: None
        world.hosts[0].files = {}
        self.refused("has no dists/sid/InRelease", keys=keys)

    def test_dates(self) -> None:
        """One that has expired, or is of the future by more than an hour, is for who asks for it."""
        for now, words in (
            (
                NOW + timedelta(days=30),
                "is stale: it was valid until 2026-03-07 12:10 UTC (--ignore-d",
            ),
            (
                NOW - timedelta(days=1, minutes=51),
                "is of 2026-02-28 12:10 UTC, which is in the future; check the clock of this machine",
            ),
        ):
            world = self.make(Archive(), hosts=2)
            self.refused(words, now=now)
            self.sync(now=now, ignores_dates=True)
            self.assertEqual(world.found(), self.expected(BINARY + ".xz", BINARY + ".gz"))
        self.make(Archive())
        self.sync(now=NOW - timedelta(days=1, minutes=49))
        first = self.archive.files
        self.publish()
        self.sync()
        self.world.hosts[0].files = first
        self.refused("older than the existing one", ignores_dates=True)

    def test_a_release_file_without_end(self) -> None:
        """It is given up at eight megabytes."""
        world = self.make(Archive())
        world.hosts[0].answer = lambda path: ok(bytes(debian_metadata.MAX_RELEASE_BYTES + 1))
        self.refused("no mirror has a release file")

    def test_a_release_file_that_drips(self) -> None:
        """It is waited for for some minutes, not for days; then the next mirror is asked."""
        world = self.make(Archive())
        host = world.hosts[0]
        host.answer = lambda path: ok(bytes(1_000_000)) if path.endswith("InRelease") else None
        host.bytes_per_s = 10
        began_s = world.clock.seconds()
        self.refused("InRelease did not arrive within 300 s")
        self.assertLess(world.clock.seconds() - began_s, mirror_api.MOST_S + 60)

    def test_indexes(self) -> None:
        """Paths that lead out, sizes that lie, weak hashes."""
        digest = "1" * 64
        for paragraph, words in (
            (f"Filename: ../x\nSize: 1\nSHA256: {digest}\n\n", "leads out of the mirror"),
            (f"Filename: /../x\nSize: 1\nSHA256: {digest}\n\n", "leads out of the mirror"),
            (f"Filename: pool/x\nSize: 99999999999999\nSHA256: {digest}\n\n", "no file has"),
            (f"Filename: pool/x\nSize: 1\nMD5sum: {'1' * 32}\n\n", "weaker"),
            ("<html>Please log in</html>\n\n", "has no file name"),
        ):
            for form in ("packed", "unpacked"):
                archive = Archive()
                archive.extra_paragraphs = paragraph
                archive.publish()
                self.make(archive)
                self.skips(words, indexes=form)

    def test_packages_in_the_place_of_indexes(self) -> None:
        """None is called as a release file or an index is, but some stand beside these."""
        data = b"a package"
        digest = sha(data)
        for path in (
            f"{SUITE}/InRelease",
            f"//{SUITE}/InRelease",
            f"{SUITE}/{BINARY}",
            f"{SUITE}/{BINARY}.xz",
            f"Dists/sid/{BINARY}.gz",
            f"dists./sid/{BINARY}.gz",
            "dists/other/Release",
            f"{SUITE}/main/binary-amd64/by-hash/SHA256/{digest}",
            f"{SUITE}/{BINARY}.diff/T-2026-01-01.gz",
            f"{SUITE}/main/icons.TAR.gz",  # as the release file names it, but for letters
            "dists",
        ):
            archive = Archive()
            archive.further = {"main/icons.tar.gz": b"icons"}
            archive.extra_paragraphs = f"Filename: {path}\nSize: {len(data)}\nSHA256: {digest}\n\n"
            archive.publish()
            self.make(archive)
            self.skips("where only indexes and release files may be")
        archive = Archive()
        path = f"{SUITE}/main/binary-amd64/p_1.deb"
        archive.extra_paragraphs = f"Filename: {path}\nSize: {len(data)}\nSHA256: {digest}\n\n"
        archive.publish()
        archive.files[path] = data
        world = self.make(archive)
        self.sync()
        self.assertEqual(world.found()[path], data)

    def test_absurd_sizes(self) -> None:
        """An index or a list of patches larger than any is not asked for, or not read."""
        archive = Archive(patches=True)
        archive.add()
        archive.publish()
        self.make(archive)
        self.patch(decompression, "MAX_INDEX_BYTES", 1000)
        self.refused("which no index has", error=BadEntry)
        self.assertEqual([p for p in self.world.hosts[0].requests if "elease" not in p], [])
        self.patch(decompression, "MAX_INDEX_BYTES", 1 << 20)
        self.patch(debian_index_selection, "MAX_RELEASE_BYTES", 2000)
        archive = Archive(by_hash=False)
        archive.further = {f"{BINARY}.diff/Index": bytes(3000)}
        archive.publish()
        self.make(archive)
        self.skips("more than 2000 bytes", with_patches=True)

    def test_wrong_sizes(self) -> None:
        """A package longer or shorter than its index says has failed, and the index is not seen."""
        for change in (lambda data: data + b"x", lambda data: data[:-1]):
            world = self.make(Archive())
            path = max(self.archive.pool, key=lambda each: len(self.archive.pool[each]))
            world.hosts[0].files = {**self.archive.files, path: change(self.archive.files[path])}
            outcome = self.sync()
            self.assertEqual(outcome.report.failed_files, 1)
            self.assertNotIn(path, world.found())
            self.assertFalse((world.directory / SUITE / "Release").exists())

    def test_wrong_indexes(self) -> None:
        """One that is not what the release file names: the old one stays."""
        world = self.make(Archive())
        self.sync()
        self.archive.add()
        self.publish()
        world.hosts[0].files = {
            path: b"<html></html>" if "binary-amd64" in path else data
            for path, data in self.archive.files.items()
        }
        self.refused("could not be fetched")
        self.refused("could not be fetched", indexes="unpacked")

    def test_links(self) -> None:
        """Symbolic links in the destination lead nowhere."""
        outside = Path(self.mktemp())
        outside.mkdir()
        for name in ("dists", "pool", f"{HIDDEN}/staged"):
            world = self.make(Archive())
            (world.directory / HIDDEN).mkdir(parents=True)
            (world.directory / name).symlink_to(outside.absolute())
            self.assertRaises((BadEntry, MirrorError), self.sync)
            self.assertEqual(list(outside.iterdir()), [])

    def test_selections(self) -> None:
        """What the release file does not have, and what cannot be."""
        self.make(Archive())
        self.refused("names no contrib/binary-amd64/Packages", components=("contrib",))
        self.refused("the architectures all amd64", architectures=("i386",))
        for options in (
            {"suites": ("../x",)},
            {"suites": ("./",)},
            {"suites": ()},
            {"components": ("",)},
        ):
            self.refused("suite", error=UsageError, **options)

    def test_too_many(self) -> None:
        """An index without end."""
        self.make(Archive())
        self.patch(debian_archive, "MAX_NAMED", 10)
        self.refused("name more than 10 files", error=BadEntry)
