"""What an index may ask for, and what it may not."""

from __future__ import annotations

from hashlib import sha256, sha512

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.archive_file import ArchiveFile, BadEntry, check_path, wanted
from pipegrid.mirror.file_list_format import MAX_LINE_BYTES, read_list

DIGEST = sha256(b"x").digest()


class PathTests(SynchronousTestCase):
    """Paths are below the destination, or refused."""

    def test_good_ones(self) -> None:
        """As archives have them."""
        for path in (
            "a",
            "pool/main/0/0ad/0ad_0.0.26-3_amd64.deb",
            "dists/sid/main/binary-amd64/by-hash/SHA256/ab",
            "with blanks/and+signs~1:2%3d",
            "ünï/cödé",
            ".hidden/...three",
            "/".join("a" * 32),
            "x" * 255,
        ):
            check_path(path)

    def test_bad_ones(self) -> None:
        """Each is refused with a sentence that shows it escaped."""
        for path in (
            "",
            "/etc/passwd",
            "..",
            "../x",
            "a/../../x",
            "a/..",
            "a//b",
            "a/",
            "./a",
            "a/./b",
            "a\0b",
            "a\nb",
            "a\x1b[2Jb",
            "a\x7fb",
            "a\\b",
            "a\udcffb",
            "x" * 256,
            "/".join("a" * 33),
            "a/" * 20 + "x" * 1000,
            ".pipegrid-mirror/lock",
            ".pipegrid-mirror",
            ".PipeGrid-Mirror/lock",  # the same where file systems do not tell letters apart
            ".pipegrid-mirror./lock",  # or dots and blanks behind a name
            ".pipegrid-mirror /lock",
            ".pipegrid-\u200dmirror/lock",  # or what nobody sees
            ".\uff50ipegrid-mirror/lock",
            " a",
            "\u00a0a",  # a list begins a path with what is no blank
        ):
            with self.subTest(path):
                error = self.assertRaises(BadEntry, check_path, path)
                self.assertTrue(str(error).isprintable())

    @given(st.text(alphabet="a./-\\\x00\n~é", max_size=12))
    def test_none_leads_out(self, path: str) -> None:
        """Whatever passes has only parts that name something below."""
        try:
            check_path(path)
        except BadEntry:
            return
        parts = path.split("/")
        self.assertFalse({"", ".", ".."} & set(parts))
        self.assertNotIn("\0", path)


class HashTests(SynchronousTestCase):
    """A file is proven by a hash that proves something."""

    def test_the_best_known(self) -> None:
        """SHA-256 if it is there; hex or bytes; weaker ones beside it do no harm."""
        digest = sha512(b"x").digest()
        self.assertEqual(
            wanted("a", 1, {"md5": "ab", "sha512": digest, "sha256": DIGEST.hex().upper()}),
            ArchiveFile("a", 1, "sha256", DIGEST),
        )
        self.assertEqual(
            wanted("a", None, {"sha512": digest}), ArchiveFile("a", None, "sha512", digest)
        )

    def test_refused(self) -> None:
        """None, weaker ones only, wrong lengths, what is no hex; sizes that are none."""
        for size, hashes, words in (
            (1, {}, "no hash"),
            (1, {"md5": "0" * 32, "sha1": "0" * 40}, "weaker hashes ('md5', 'sha1')"),
            (1, {"sha256": "0" * 63}, "is not one"),
            (1, {"sha256": "g" * 64}, "is not one"),
            (1, {"sha256": "0 " * 32}, "is not one"),
            (1, {"sha256": b"short"}, "is not one"),
            (-1, {"sha256": DIGEST}, "-1 bytes"),
            (1 << 60, {"sha256": DIGEST}, "bytes, which no file has"),
        ):
            error = self.assertRaises(BadEntry, wanted, "a", size, hashes)
            self.assertIn(words, str(error))


class ListTests(SynchronousTestCase):
    """A line a file."""

    def test_lines(self) -> None:
        """Blanks between, a path that may hold some; comments and empty lines say nothing."""
        lines = [
            b"# comment\n",
            b"\n",
            DIGEST.hex().encode() + b"  1 a b/c d\n",
            DIGEST.hex().upper().encode() + b"\t 0\td\r\n",
            DIGEST.hex().encode() + b" 7 \xc3\xbc",
        ]
        self.assertEqual(
            list(read_list(lines, "the list")),
            [
                ArchiveFile("a b/c d", 1, "sha256", DIGEST),
                ArchiveFile("d", 0, "sha256", DIGEST),
                ArchiveFile("ü", 7, "sha256", DIGEST),
            ],
        )

    def test_a_mark(self) -> None:
        """At the beginning, and ends of lines as on Windows, change nothing."""
        lines = [
            b"\xef\xbb\xbf" + DIGEST.hex().encode() + b" 1 a\r\n",
            DIGEST.hex().encode() + b" 2 b c\r\n",
        ]
        self.assertEqual([each.path for each in read_list(lines, "the list")], ["a", "b c"])

    def test_bad_lines(self) -> None:
        """Each is named with its number."""
        hexed = DIGEST.hex().encode()
        for line in (
            b"nonsense",
            hexed + b" 1",
            hexed + b" x a",
            hexed[:-1] + b" 1 a",
            hexed + b" 1 ../a",
            hexed + b" 1 \xff",
            hexed + b" 1 a\0b",
            (DIGEST.hex() + " 1 a").encode("utf-16"),
            hexed + b" 99999999999999999 a",
            hexed + b" 1 " + b"x" * MAX_LINE_BYTES,
        ):
            error = self.assertRaises(BadEntry, list, read_list([b"\n", line], "the list"))
            self.assertTrue(str(error).startswith("the list, line 2: "), error)
