"""Which indexes of a suite are chosen, for what real release files say of components and architectures."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.archive_file import MirrorError
from pipegrid.mirror.debian_index_selection import Selection, indexes_of
from pipegrid.mirror.debian_metadata import read_release
from pipegrid.mirror.debian_release_files import Suite

FORMS = ("", ".xz", ".gz")


def suite(*bases: str, others: tuple[str, ...] = (), **fields: str) -> Suite:
    """A suite whose release file names these indexes in all forms, other files, and has further fields."""
    paths = [base + form for base in bases for form in FORMS]
    text = "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in fields.items())
    text += "SHA256:\n" + "".join(f" {'0' * 64} 10 {path}\n" for path in (*paths, *others))
    return Suite("dists/sid", read_release(text.encode(), "Release"), {}, None)


def chosen(found: Suite, *components: str, **selection: object) -> list[str]:
    """The indexes, by path below the suite, and how they are read."""
    wanted = Selection(("sid",), components, **selection)  # type: ignore[arg-type]
    return [
        f"{index.path.removeprefix('dists/sid/')} {index.kind}".strip()
        for index in indexes_of(found, wanted, [])
    ]


class SelectingTests(SynchronousTestCase):
    """Each as some archive has it."""

    def test_components_with_a_directory(self) -> None:
        """Debian's archive of security updates says ``updates/main``, and has ``main``."""
        found = suite(
            "main/binary-amd64/Packages",
            "contrib/binary-amd64/Packages",
            Components="updates/main updates/contrib",
            Architectures="amd64",
        )
        both = [f"{name}/binary-amd64/Packages.xz packages" for name in ("main", "contrib")]
        self.assertEqual(chosen(found), both)
        self.assertEqual(chosen(found, "updates/contrib"), both[1:])
        self.assertEqual(chosen(found, "contrib"), both[1:])
        absent: list[str] = []
        lacking = Selection(("sid",), ("updates/non-free",))
        self.assertEqual(list(indexes_of(found, lacking, absent)), [])
        (sentence,) = absent
        self.assertIn("names no updates/non-free/binary-amd64/Packages", sentence)
        # Others mean what they say.
        found = suite("main/debian-installer/binary-amd64/Packages", "main/binary-amd64/Packages")
        self.assertEqual(
            chosen(found, "main/debian-installer"),
            ["main/debian-installer/binary-amd64/Packages.xz packages"],
        )

    def test_packages_for_all_architectures(self) -> None:
        """apt asks for their index, too, unless the release file says that each other one has them."""
        bases = [f"main/binary-{name}/Packages" for name in ("all", "amd64", "i386")]
        for fields, apart in (
            ({"Architectures": "all amd64 i386"}, True),
            ({"Architectures": "all amd64", "No_Support_for_Architecture_all": "Packages"}, False),
            ({"Architectures": "all amd64", "No_Support_for_Architecture_all": "Contents"}, True),
            ({"Architectures": "amd64 i386"}, False),
        ):
            found = suite(*bases, others=(), Components="main", **fields)
            expected = ["main/binary-amd64/Packages.xz packages"]
            if apart:
                expected.append("main/binary-all/Packages.xz packages")
            self.assertEqual(chosen(found), expected, fields)
            both = chosen(found, architectures=("all", "amd64"))
            self.assertEqual(len(both), 2, fields)
        found = suite(*bases[1:], Architectures="all amd64", Components="main")
        self.assertEqual(chosen(found), expected)

    def test_also_names_no_packages(self) -> None:
        """Nothing that is seen names what is not there: indexes of packages come with these alone."""
        found = suite(
            "main/binary-amd64/Packages",
            "main/binary-i386/Packages",
            "main/debian-installer/binary-amd64/Packages",
            "main/source/Sources",
            others=(
                "main/Contents-amd64",
                "main/Contents-amd64.gz",
                "main/Contents-amd64.diff/Index",
                "main/binary-i386/Packages.diff/Index",
                "main/binary-i386/Release",
            ),
            Components="main",
        )
        own = "main/binary-amd64/Packages.xz packages"
        self.assertEqual(
            chosen(found, also=("*",)), [own, "main/Contents-amd64.gz", "main/binary-i386/Release"]
        )
        self.assertEqual(chosen(found, also=("*/none",)), [own])
        self.assertEqual(
            chosen(found, also=("*Contents*",), with_patches=True),
            [own, "main/Contents-amd64.gz", "main/Contents-amd64.diff/Index patches"],
        )
        error = self.assertRaises(MirrorError, chosen, found, also=("*installer*/Packages.xz",))
        self.assertIn("by component (here main/debian-installer)", str(error))
