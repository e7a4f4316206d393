"""Control files, release files and lists of patches: what they say, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import debian_metadata
from pipegrid.mirror.archive_file import BadEntry
from pipegrid.mirror.debian_metadata import (
    MAX_PARAGRAPH_BYTES,
    packages,
    paragraphs,
    read_patch_index,
    read_release,
    sources,
)

H1, H2, H3 = ("1" * 64, "2" * 64, "3" * 64)
PACKAGE = f"Package: a\nFilename: pool/a.deb\nSize: 12\nSHA256: {H1}\nMD5sum: {'4' * 32}\n"
SOURCE = (
    f"Package: s\nDirectory: pool/s\nFiles:\n {'4' * 32} 3 s.dsc\n {'5' * 32} 4 s.tar.xz\n"
    f"Checksums-Sha256:\n {H1} 3 s.dsc\n {H2} 4 s.tar.xz\n"
)
RELEASE = (
    "Suite: unstable\nCodename: sid\nComponents: main contrib\nArchitectures: amd64\n"
    "Date: Sat, 28 Feb 2026 08:12:33 UTC\nValid-Until: Sat, 07 Mar 2026 08:12:33 UTC\n"
    f"Acquire-By-Hash: yes\nMD5Sum:\n {'4' * 32} 5 main/x\nSHA256:\n {H1} 5 main/x\n {H2}  6 main/y\n"
)
FIELDS = frozenset(("A", "B"))


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """Cut it there."""
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(ends)]


class ParagraphTests(SynchronousTestCase):
    """Paragraphs of fields."""

    def test_fields(self) -> None:
        """Those that are asked for, with lines that continue; others are not looked at."""
        data = b"A: 1\nC: x\n y\nB:\n 2\n\t3\n\n\n\nC: only\n\nA:4"
        self.assertEqual(
            list(paragraphs([data], FIELDS, "x")), [{"A": "1", "B": "\n2\n3"}, {}, {"A": "4"}]
        )

    @given(
        st.text("AB: \n\tx.", max_size=60).map(str.encode),
        st.lists(st.integers(0, 1000), max_size=8),
    )
    def test_cut_anywhere(self, data: bytes, places: list[int]) -> None:
        """The pieces in which it comes do not matter."""

        def outcome(blocks: list[bytes]) -> object:
            try:
                return list(paragraphs(blocks, FIELDS, "x"))
            except BadEntry as error:
                return str(error)

        self.assertEqual(outcome(cut(data, places)), outcome([data]))

    def test_bounds(self) -> None:
        """A paragraph without an end is given up before it fills the memory."""
        taken = 0

        def endless() -> Iterable[bytes]:
            nonlocal taken
            while True:
                taken += 1 << 20
                yield b"A" * (1 << 20)

        error = self.assertRaises(BadEntry, list, paragraphs(endless(), FIELDS, "some"))
        self.assertIn("a paragraph of some is longer", str(error))
        self.assertLessEqual(taken, MAX_PARAGRAPH_BYTES + (1 << 20))

    def test_as_apt_reads_them(self) -> None:
        """In any case, the last of several, with carriage returns or blanks before the colon."""
        for data in (b"A: 1\nB: 2", b"a: 1\nb:2", b"A: 0\nB: 2\nA: 1", b"A : 1\nb\t: 2"):
            for text in (data, data.replace(b"\n", b"\r\n") + b"\r\n\r\n"):
                for usual in (FIELDS, frozenset[str]()):
                    blocks = cut(text, range(len(text)))
                    for pieces in (blocks, [text]):
                        found = list(paragraphs(pieces, FIELDS, "x", usual))
                        self.assertEqual(found, [{"A": "1", "B": "2"}], text)

    def test_not_utf8(self) -> None:
        """Old names of maintainers hurt nobody."""
        self.assertEqual(list(paragraphs([b"M: \xfc\nA: 1"], FIELDS, "x")), [{"A": "1"}])


class IndexTests(SynchronousTestCase):
    """``Packages`` and ``Sources``."""

    def refused(self, read: Callable[..., Iterable[Any]], text: str, words: str) -> None:
        """Look that it is, with these words."""
        error = self.assertRaises(BadEntry, lambda: list(read([text.encode()], "the index")))
        self.assertIn(words, str(error))
        self.assertNotIn("\n", str(error))

    def test_packages(self) -> None:
        """Path, size and best hash of each."""
        text = PACKAGE + "\n" + PACKAGE.replace("pool/a", "./pool/b") + f"SHA512: {'6' * 128}\n"
        first, second = packages([text.encode()], "x")
        self.assertEqual((first.path, first.size, first.algorithm), ("pool/a.deb", 12, "sha256"))
        self.assertEqual(first.digest.hex(), H1)
        self.assertEqual(second.path, "pool/b.deb")
        for path in ("/pool/a.deb", "//pool//./a.deb", "./pool/./a.deb"):
            (found,) = packages([PACKAGE.replace("pool/a.deb", path).encode()], "x")
            self.assertEqual(found.path, "pool/a.deb")

    def test_bad_packages(self) -> None:
        """One sentence each."""
        for old, new, words in (
            ("pool/a.deb", "../../etc/passwd", "leads out of the mirror"),
            ("pool/a.deb", "/../etc/passwd", "leads out of the mirror"),
            ("pool/a.deb", "//.pipegrid-mirror/lock", "the mirror's own"),
            ("pool/a.deb", "//./", "is empty"),
            ("pool/a.deb", ".pipegrid-mirror/lock", "the mirror's own"),
            ("pool/a.deb", "pool/a\x1b.deb", "a character that no archive uses"),
            ("Size: 12", "Size: -1", "has no size"),
            ("Size: 12", "Size: ²", "has no size"),
            ("Size: 12", "Size: " + "9" * 16, "has no size"),
            ("Size: 12", f"Size: {1 << 45}", "no file has"),
            ("Size: 12\n", "", "has no size"),
            (f"SHA256: {H1}\n", "", "weaker hashes ('md5')"),
            (H1, H1[1:], "is not one"),
            ("Filename: pool/a.deb\n", "", "has no file name"),
        ):
            self.assertIn(old, PACKAGE)
            self.refused(packages, PACKAGE.replace(old, new), words)
        self.refused(packages, "<html>Please log in</html>", "has no file name")

    def test_sources(self) -> None:
        """Each file of each source, in its directory."""
        found = list(sources([SOURCE.encode()], "x"))
        self.assertEqual([each.path for each in found], ["pool/s/s.dsc", "pool/s/s.tar.xz"])
        self.assertEqual([each.size for each in found], [3, 4])
        self.assertEqual([each.digest.hex() for each in found], [H1, H2])

    def test_bad_sources(self) -> None:
        """One sentence each."""
        for old, new, words in (
            ("pool/s", "../s", "leads out"),
            ("3 s.dsc\n", "3 ../s.dsc\n", "leads out"),
            (f"{H1} 3", f"{H1} 7", "two sizes"),
            (f" {H1} 3 s.dsc\n", "", "weaker hashes"),
            (f"{H1} 3 s.dsc", f"{H1} s.dsc", "not hash, size and name"),
            ("Directory: pool/s\n", "", "has no directory"),
        ):
            self.assertIn(old, SOURCE)
            self.refused(sources, SOURCE.replace(old, new), words)

    def test_what_cannot_be_used(self) -> None:
        """With somebody to tell, it is left out, and what is before and after it is there."""
        reasons: list[str] = []

        def skip(error: BadEntry) -> None:
            reasons.append(str(error))

        bad = PACKAGE.replace("pool/a", "../a")
        weak = PACKAGE.replace(f"SHA256: {H1}\n", "")
        twice = f"{PACKAGE}\n{bad}\n{weak}\n{PACKAGE.replace('pool/a', 'pool//./b')}"
        found = [each.path for each in packages([twice.encode()], "it", skip)]
        self.assertEqual(found, ["pool/a.deb", "pool/b.deb"])
        self.assertEqual(len(reasons), 2)
        self.assertIn("leads out", reasons[0])
        self.assertIn("weaker hashes", reasons[1])
        reasons.clear()
        text = SOURCE.replace(f"{H1} 3 s.dsc", f"{H1} 3 s.dsc\n {H3} 3 s.dsc\n junk")
        files = [(each.path, each.digest.hex()) for each in sources([text.encode()], "it", skip)]
        self.assertEqual(
            files, [("pool/s/s.dsc", H1), ("pool/s/s.tar.xz", H2), ("pool/s/s.dsc", H3)]
        )
        self.assertEqual(len(reasons), 1)

    @given(st.lists(st.sampled_from(PACKAGE.splitlines()), max_size=12), st.binary(max_size=30))
    def test_only_one_error(self, lines: list[str], junk: bytes) -> None:
        """Whatever an index says: its files, or ``BadEntry``."""
        data = "\n".join(lines).encode() + b"\n" + junk
        for read in (packages, sources):
            with contextlib.suppress(BadEntry):
                for each in read([data], "x"):
                    self.assertEqual(each.algorithm, "sha256")


class ReleaseTests(SynchronousTestCase):
    """Release files."""

    def test_all_of_it(self) -> None:
        """What it says."""
        release = read_release(RELEASE.encode(), "x")
        self.assertEqual(release.components, ("main", "contrib"))
        self.assertTrue(release.by_hash)
        self.assertEqual(release.date, datetime(2026, 2, 28, 8, 12, 33, tzinfo=timezone.utc))
        self.assertEqual(
            {path: each.size for path, each in release.files.items()}, {"main/x": 5, "main/y": 6}
        )

    def test_refused(self) -> None:
        """One sentence each."""
        for text, words in (
            ("<html>Please log in</html>", "answers every request with a web page"),
            ("", "not a release file"),
            (
                RELEASE.replace("SHA256:", "SHA1:").replace(H1, "4" * 40),
                "weaker hashes than SHA-256",
            ),
            (RELEASE.replace("main/x", "../x"), "leads out"),
            (RELEASE.replace(f"{H1} 5", f"{H1} 50"), "two sizes"),
            (RELEASE.replace(f"{H1} 5", f"{H1} many"), "not hash, size and path"),
            (RELEASE.replace("07 Mar 2026", "77 Mar 2026"), "an invalid date"),
            (RELEASE.replace("Sat, 28 Feb 2026 08:12:33 UTC", "soon"), "an invalid date"),
        ):
            error = self.assertRaises(BadEntry, read_release, text.encode(), "it")
            self.assertIn(words, str(error))
            self.assertNotIn("\n", str(error))

    def test_lines_that_cannot_be_used(self) -> None:
        """They are left out; a path with two hashes keeps both, and so does a file with two kinds."""
        reasons: list[BadEntry] = []
        text = (
            RELEASE + f" {H3} 7 main/y\n {H3} x main/z\n {H3} 1 ../z\nSHA512:\n {H1 * 2} 5 main/x\n"
        )
        release = read_release(text.encode(), "it", reasons.append)
        self.assertEqual(set(release.files), {"main/x", "main/y"})
        self.assertEqual(len(reasons), 2)
        self.assertEqual([each.digest.hex() for each in release.others["main/y"]], [H3])
        self.assertEqual([name for name, _ in release.digests_of("main/x")], ["sha256", "sha512"])
        self.assertEqual([name for name, _ in release.digests_of("main/y")], ["sha256"])

    def test_no_components(self) -> None:
        """Then those count whose indexes are named, as with apt."""
        text = RELEASE.replace("Components: main contrib\n", "")
        self.assertEqual(read_release(text.encode(), "it").components, ())
        text += f" {H1} 2 main/binary-amd64/Packages.gz\n {H2} 2 a/b/source/Sources\n"
        self.assertEqual(read_release(text.encode(), "it").components, ("main", "a/b"))
        text = RELEASE.replace("main contrib", "main, contrib").replace("Components", "components")
        self.assertEqual(read_release(text.encode(), "it").components, ("main", "contrib"))

    def test_dates(self) -> None:
        """As apt and people write them, one moment."""
        moment = datetime(2026, 2, 28, 8, 12, 33, tzinfo=timezone.utc)
        for date in (
            "2026-02-28T08:12:33Z",
            "2026-02-28 08:12:33",
            "2026-02-28 08:12:33 UTC",
            "2026-02-28T09:12:33.5+01:00",
            "六, 28  2月 2026 08:12:33 +0000",
            "六, 28 2月 2026 08:12:33 UTC",
            "2026年 02月 28日 星期六 08:12:33 UTC",
            "Sat Feb 28 08:12:33 2026",
            "Saturday, 28-Feb-26 08:12:33 GMT",
            "28 Feb 2026 03:12:33 -0500",
            "Sat, 28 february 2026 8:12:33 UTC",
        ):
            text = RELEASE.replace("Sat, 28 Feb 2026 08:12:33 UTC", date)
            self.assertEqual(read_release(text.encode(), "it").date, moment, date)
        text = RELEASE.replace("Sat, 28 Feb 2026 08:12:33 UTC", "Sa, 28 Dez 2026 08:12:33 UTC")
        self.assertRaises(BadEntry, read_release, text.encode(), "it")
        self.assertIsNone(read_release(text.encode(), "it", ignores_dates=True).date)

    def test_many_files(self) -> None:
        """More files than any archive's are refused, however short the lines are that name them."""
        lines = "".join(f" a 1 {number:x}\n" for number in range(20))
        text = RELEASE.replace("MD5Sum:\n", f"MD5Sum:\n{lines}")
        self.assertEqual(set(read_release(text.encode(), "it").files), {"main/x", "main/y"})
        self.patch(debian_metadata, "MAX_RELEASE_FILES", 19)
        error = self.assertRaises(BadEntry, read_release, text.encode(), "it")
        self.assertIn("it names more than 19 files", str(error))

    @given(st.text(max_size=40))
    def test_any_date(self, text: str) -> None:
        """It is a date, or refused."""
        line = text.replace("\n", " ").replace("\r", " ")
        data = RELEASE.replace("Sat, 28 Feb 2026 08:12:33 UTC", line).encode("utf-8", "replace")
        try:
            release = read_release(data, "it")
        except BadEntry:
            return
        self.assertTrue(release.date is None or release.date.tzinfo is not None)


PATCHES = (
    f"SHA256-Current: {H3} 30\nSHA256-History:\n {H1} 10 one\n {H2} 20 two\n"
    f"SHA256-Patches:\n {H1} 1 one\n {H1} 1 two\n"
    f"SHA256-Download:\n {H1} 5 one.gz\n {H2} 6 two.gz\n"
)


class PatchIndexTests(SynchronousTestCase):
    """The ``Index`` of patches."""

    def chain(self, text: str, have: str) -> list[str] | None:
        """Return the names of the patches from there, which are packed."""
        found = read_patch_index(text.encode(), "main/P.diff", "x").chain(bytes.fromhex(have))
        return (
            None
            if found is None
            else [step.packed.path.split("/")[-1] for step in found if step.packed]
        )

    def test_chains(self) -> None:
        """From any version that is known to the newest; merged patches lead there at once."""
        self.assertEqual(self.chain(PATCHES, H1), ["one.gz", "two.gz"])
        self.assertEqual(self.chain(PATCHES, H2), ["two.gz"])
        self.assertEqual(self.chain(PATCHES, H3), [])
        self.assertIsNone(self.chain(PATCHES, "9" * 64))
        merged = PATCHES + "X-Patch-Precedence: merged\n"
        self.assertEqual(self.chain(merged, H1), ["one.gz"])
        back = PATCHES.replace(f"{H2} 20 two", f"{H1} 10 two")
        self.assertEqual(self.chain(back, H1), ["two.gz"])

    def test_what_is_fetched(self) -> None:
        """The packed patch, beside the list, by its own hash; a patch that only its contents prove is not."""
        first, second = read_patch_index(PATCHES.encode(), "main/P.diff", "x").steps
        assert first.packed is not None
        self.assertEqual((first.packed.path, first.packed.size), ("main/P.diff/one.gz", 5))
        self.assertEqual((first.before.hex(), second.before.hex()), (H1, H2))
        without = PATCHES.partition("SHA256-Download")[0]
        self.assertEqual(
            [each.packed for each in read_patch_index(without.encode(), "d", "x").steps], [None] * 2
        )

    def test_refused(self) -> None:
        """One sentence each."""
        for text, words in (
            ("<html>", "not an index of patches"),
            (PATCHES.replace(f" {H1} 10 one", f" {H1} 10 ../one"), "leads out"),
            (PATCHES.replace(f" {H1} 10 one", f" {H1} ten one"), "not hash, size and name"),
            (PATCHES.replace(f"{H3} 30", f"{H3[1:]} 30"), "not hash and size"),
            (PATCHES.replace(f"{H3} 30", H3), "not hash and size"),
        ):
            error = self.assertRaises(BadEntry, read_patch_index, text.encode(), "d", "it")
            self.assertIn(words, str(error))
