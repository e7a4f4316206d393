"""What is read of an RPM repository's XML, and what is not."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import rpm_metadata
from pipegrid.mirror.archive_file import BadEntry
from pipegrid.mirror.rpm_metadata import Package, RpmVersion, XmlParser, packages, read_repomd
from tests.mirror.archive import sha
from tests.mirror.rpmarchive import REPOMD, Made, RpmArchive

# A machine that is busy draws slowly, too.
PROPERTY = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


class Recorder:
    """Notes what it is told."""

    def __init__(self, wants_text: bool = True) -> None:
        self.texts: list[tuple[int, str, str]] = []
        self._wants_text = wants_text

    def opened(self, depth: int, name: str, attributes: object) -> bool:
        return self._wants_text

    def closed(self, depth: int, name: str, text: str) -> None:
        self.texts.append((depth, name, text))


def parsed(pieces: Iterable[bytes], wants_text: bool = True) -> Recorder:
    """Read a document."""
    recorder = Recorder(wants_text)
    parser = XmlParser(recorder, "x")
    for piece in pieces:
        parser.feed(piece)
    parser.end()
    return recorder


class XmlTests(SynchronousTestCase):
    """The parser."""

    def refused(self, words: str, data: bytes, wants_text: bool = True) -> None:
        """Look that a document is refused in one sentence, whole and byte by byte."""
        pieces = (data[at : at + 1] for at in range(len(data))) if len(data) < 5000 else (data,)
        for each in ([data], pieces):
            error = self.assertRaises(BadEntry, parsed, each, wants_text)
            self.assertIn(words, str(error))
            self.assertNotIn("\n", str(error))

    def test_texts(self) -> None:
        """A text is what stands in an element, outside of others, however it is cut."""
        data = "<a><b>1 &lt; 2&#228;</b><c/>ä</a>".encode()
        for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
            self.assertEqual(parsed(pieces).texts, [(2, "b", "1 < 2ä"), (2, "c", ""), (1, "a", "")])

    def test_entities(self) -> None:
        """No document type, and so no entity, inside or outside, is read."""
        self.refused("a document type ('a')", b'<!DOCTYPE a [<!ENTITY b "bb">]><a>&b;</a>')
        self.refused("a document type", b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>')
        self.refused("is not XML", b"<a>&b;</a>")

    def test_encodings(self) -> None:
        """It is UTF-8, whatever it says."""
        self.refused("is not XML", "<?xml version='1.0'?><a>ä</a>".encode("latin-1"))
        self.refused("is not UTF-8", "<a>ä</a>".encode("utf-16"))
        self.assertEqual(
            parsed(["<?xml version='1.0' encoding='cp037'?><a>ä</a>".encode()]).texts,
            [(1, "a", "ä")],
        )

    def test_damaged(self) -> None:
        """What is cut off, or no XML, is said to be that."""
        for data in (
            b"",
            b"<a>",
            b"<a></b>",
            b"hello",
            b"<a/><b/>",
            b"<a>\x00</a>",
            b"<a b='1' b='2'/>",
        ):
            self.refused("is not XML", data)

    def test_depth(self) -> None:
        """Elements are not nested without end."""
        deepest = rpm_metadata.MAX_DEPTH
        parsed([b"<a>" * deepest + b"</a>" * deepest])
        self.refused("nested more than", b"<a>" * (deepest + 1))

    def test_markup(self) -> None:
        """A tag, a comment, or a value that does not end is not kept."""
        large = b"x" * (rpm_metadata.MAX_MARKUP_BYTES + 2 * rpm_metadata.FED_BYTES)
        for start in (b"<a b='", b"<a><!--", b"<", b"<a><?x "):
            self.refused("a tag or comment of more than", start + large)

    def test_texts_are_bounded(self) -> None:
        """A text that is wanted has a bound; one that is not is passed over, however long."""
        large = b"<a>" + b"x\n" * rpm_metadata.MAX_TEXT_CHARS + b"</a>"
        self.refused("a text of more than", large)
        self.assertEqual(parsed([b"<a>" + b"x" * (4 << 20) + b"</a>"], False).texts, [(1, "a", "")])

    def test_names(self) -> None:
        """Names are not kept without end."""
        names = [b"<n%d/>" % number for number in range(3 * rpm_metadata.MAX_NAMES)]
        self.refused("different names", b"<a>" + b"".join(names) + b"</a>")


def primary(*made: Made, **further: str) -> list[Package]:
    """Read a ``primary`` of such packages."""
    archive = RpmArchive(count=0)
    archive.packages = list(made)
    return list(packages([archive.primary()], "primary"))


class PrimaryTests(SynchronousTestCase):
    """``primary``."""

    def refused(self, words: str, **made: object) -> None:
        """Look that a package is refused in one sentence."""
        error = self.assertRaises(BadEntry, primary, Made("a", b"data", **made))  # type: ignore[arg-type]
        self.assertIn(words, str(error))
        self.assertNotIn("\n", str(error))

    def test_a_package(self) -> None:
        """Path, size, hash; name, architecture, version."""
        (found,) = primary(Made("a", b"data", ("2", "1.0~rc1", "3"), "noarch", "b+c/é &<.rpm"))
        self.assertEqual(found.version, RpmVersion("2", "1.0~rc1", "3"))
        self.assertEqual((found.name, found.arch), ("a", "noarch"))
        self.assertEqual((found.file.path, found.file.size), ("b+c/é &<.rpm", 4))
        self.assertEqual(found.file.digest, sha256(b"data").digest())

    @PROPERTY
    @given(st.lists(st.integers(0, 4000), max_size=5))
    def test_cuts(self, cuts: list[int]) -> None:
        """Where the document is cut changes nothing."""
        data = RpmArchive(count=4).primary()
        places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
        pieces = [data[start:end] for start, end in pairwise(places)]
        self.assertEqual(list(packages(pieces, "x")), list(packages([data], "x")))

    def test_while_it_is_read(self) -> None:
        """Packages are told before the rest has come."""
        data = RpmArchive(count=40).primary()
        found = packages(iter([data[: len(data) // 2]]), "x")
        self.assertEqual(next(found).name, "p0")
        self.assertRaises(BadEntry, list, found)

    def test_paths(self) -> None:
        """No path leads elsewhere."""
        self.refused("leads out of the mirror", path="../a.rpm")
        self.refused("leads out of the mirror", path="/../etc/passwd")
        self.refused("one of the mirror's own", path="//.pipegrid-mirror/lock")
        self.refused("where only indexes may be", path=f"/{REPOMD}")
        for path in ("/a/b.rpm", "//a//b.rpm", "./a/./b.rpm"):  # as dnf joins it with the URL
            self.assertEqual(primary(Made("a", b"data", path=path))[0].file.path, "a/b.rpm")
        self.refused("one of the mirror's own", path=".pipegrid-mirror/lock")
        self.refused("where only indexes may be", path=REPOMD)
        self.refused("where only indexes may be", path="./repodata/x")
        for path in ("Repodata/repomd.xml", "REPODATA/x", "repodata./x", "repodata /x", "repodata"):
            self.refused("where only indexes may be", path=path)
        self.refused("where only indexes may be", path="repo\u200bdata/x")
        self.assertEqual(len(primary(Made("a", b"data", path="repodata-old/a.rpm"))), 1)
        self.refused("has a character", path="a\\b")

    def test_bases(self) -> None:
        """A package is below the repository's own URLs, where its base says, and nowhere else."""
        urls = ("http://a.example/epel", "https://b.example:8443/x/")

        def path(base: str) -> str:
            archive = RpmArchive(count=0)
            archive.packages = [Made("p", b"p", path="P/p.rpm", further=f'xml:base="{base}" ')]
            (found,) = packages([archive.primary()], "primary.xml", urls)
            return found.file.path

        for base, above in (
            ("", ""),
            ("./", ""),
            ("pool", "pool/"),
            ("./pool/a/", "pool/a/"),
            ("http://a.example/epel", ""),
            ("http://a.example/epel/", ""),
            ("http://a.example/epel/9", "9/"),
            ("https://b.example:8443/x/y/", "y/"),
        ):
            self.assertEqual(path(base), f"{above}P/p.rpm")
        for base in (
            "http://b.example/",
            "http://a.example/",
            "http://a.example/epel-old/",
            "https://a.example/epel/",
            "http://a.example:8080/epel/",
            "//a.example/epel/",
            "/epel/",
            "file:///epel/",
            "file:epel",
        ):
            error = self.assertRaises(BadEntry, path, base)
            self.assertIn("which is not among the mirrors given", str(error))
        for base in ("../", "pool/../..", "http://a.example/epel/../other", "a//b", "pool/./"):
            error = self.assertRaises(BadEntry, path, base)
            self.assertIn("not to be trusted", str(error))
        for base in ("repodata", "http://a.example/epel/repodata/", "Repodata/x"):
            error = self.assertRaises(BadEntry, path, base)
            self.assertIn("where only indexes may be", str(error))

    def test_hashes(self) -> None:
        """Weaker hashes than SHA-256, and what is none, are refused by name."""
        self.refused("only weaker hashes ('sha1')", kind="sha", checksum="0" * 40)
        self.refused("only weaker hashes ('md5')", kind="md5", checksum="0" * 32)
        self.refused("is not one", checksum="0" * 63)
        self.refused("does not give the hash", kind="")
        (found,) = primary(Made("a", b"", kind="sha512", checksum="0" * 128))
        self.assertEqual(found.file.algorithm, "sha512")

    def test_sizes(self) -> None:
        """A size is a number, and one that files have."""
        self.refused("does not give the size", size=-1)
        self.refused("which no file has", size=1 << 45)

    def test_twice(self) -> None:
        """An element that counts is there once: who else reads it might take the other one."""
        data = RpmArchive(count=1).primary()
        for element in (b'<location href="b"/>', b'<size package="1"/>', b"<name>b</name>"):
            twice = data.replace(b"<format>", element + b"<format>")
            error = self.assertRaises(BadEntry, list, packages([twice], "x"))
            self.assertIn("more than one <", str(error))
        hidden = data.replace(b"<format>", b'<format><location href="../b"/>')
        self.assertEqual(list(packages([hidden], "x")), list(packages([data], "x")))

    def test_others(self) -> None:
        """What is not a package of rpm's is passed over; another document is none."""
        data = RpmArchive(count=1).primary()
        self.assertEqual(list(packages([data.replace(b'type="rpm"', b'type="deb"')], "x")), [])
        error = self.assertRaises(BadEntry, list, packages([b"<html><p>log in</p></html>"], "x"))
        self.assertIn("not a primary", str(error))

    def test_long_names(self) -> None:
        """Names and versions are bounded."""
        self.refused("a name or version of more than", version=("0", "1" * 300, "1"), path="a.rpm")


class RepomdTests(SynchronousTestCase):
    """``repomd.xml``."""

    ROW = (
        '<data type="{kind}"><checksum type="{hash}">{digest}</checksum><location href="{path}"/>'
        "<size>{size}</size><timestamp>{time}</timestamp></data>"
    )

    def text(self, **changed: object) -> bytes:
        """Return one that names one file."""
        usual = {
            "kind": "primary",
            "hash": "sha256",
            "digest": sha(b""),
            "path": "repodata/primary.xml.gz",
            "size": 3,
            "time": 7,
        }
        row = self.ROW.format(**{**usual, **changed})
        return f"<repomd><revision> 12 </revision>{row}</repomd>".encode()

    def refused(self, words: str, data: bytes) -> None:
        """Look that it is refused in one sentence."""
        error = self.assertRaises(BadEntry, read_repomd, data, "x")
        self.assertIn(words, str(error))
        self.assertNotIn("\n", str(error))

    def test_all_of_it(self) -> None:
        """Revision, newest time, and all files."""
        archive = RpmArchive()
        found = read_repomd(archive.files[REPOMD], "x")
        self.assertEqual(
            (found.revision, found.timestamp), (str(archive.revision), archive.revision)
        )
        self.assertEqual([each.kind for each in found.files], ["primary", "filelists", "group"])
        self.assertEqual(found.primary.file.path, archive.primary_path)
        assert found.primary.opened is not None
        self.assertEqual(found.primary.opened.digest, sha256(archive.primary()).digest())
        self.assertEqual(read_repomd(self.text(time="8.5"), "x").timestamp, 8)

    def test_refusals(self) -> None:
        """Each says what is wrong."""
        self.refused("perhaps the mirror answers every request", b"<html></html>")
        self.refused("perhaps the mirror answers every request", b"Please log in")
        self.refused("names no primary", self.text(kind="other"))
        self.refused("leads out", self.text(path="../x"))
        self.refused("has another meaning", self.text(path=REPOMD))
        self.refused("has another meaning", self.text(path=REPOMD + ".asc"))
        self.refused("only weaker hashes ('sha1')", self.text(hash="sha", digest="0" * 40))
        self.refused("does not give the size", self.text(size=""))
        self.refused("does not give the hash", self.text(hash=""))
        row = self.text()[len("<repomd>") : -len("</repomd>")]
        self.refused("has another meaning", b"<repomd>" + row * 2 + b"</repomd>")
        other = row.replace(b"primary.xml", b"other.xml")
        self.refused("two files primary", b"<repomd>" + row + other + b"</repomd>")
        self.refused("without a location", self.text().replace(b"location", b"place"))
        many = b"".join(row.replace(b"primary", b"p%d" % number) for number in range(1001))
        self.refused("more than 1000 files", b"<repomd>" + many + b"</repomd>")
