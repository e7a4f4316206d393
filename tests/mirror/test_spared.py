"""Several runs to one directory: none removes what another one keeps there; where they clash is said."""

from __future__ import annotations

import lzma
import os

from pipegrid.mirror.archive_file import MirrorError
from tests.mirror.archive import SUITE, Archive, check_readers, sha
from tests.mirror.test_debian import DebianCase

OTHER = "dists/rel"
CONTRIB = "contrib/binary-amd64/Packages"
CONTRIB_DEB = "pool/contrib/c/c_%s_amd64.deb"


def paragraph(path: str, data: bytes) -> bytes:
    """What an index says of a package."""
    return f"Package: c\nFilename: {path}\nSize: {len(data)}\nSHA256: {sha(data)}\n\n".encode()


class SuitesTests(DebianCase):
    """A suite a run."""

    def setUp(self) -> None:
        archive = Archive()
        self.other = Archive(
            packages={f"pool/main/q/q{n}/q{n}_1_amd64.deb": b"q%d" % n for n in range(3)}
        )
        self.make(archive)
        self.merge()

    def merge(self) -> None:
        """The mirror has both suites as they are now."""
        renamed = {path.replace(SUITE, OTHER, 1): data for path, data in self.other.files.items()}
        self.world.hosts[0].files = {**self.archive.files, **renamed}

    def test_in_turns(self) -> None:
        """Each is brought up to date, and what it does not name any more goes; the other one stays."""
        for form in ("packed", "unpacked", "zstd"):
            self.setUp()
            self.sync(indexes=form)
            self.sync(suites=("rel",), indexes=form)
            both = self.world.found()
            self.assertEqual(self.sync(delete=True, indexes=form).removed, [], form)
            outcome = self.sync(suites=("rel",), delete=True, indexes=form)
            self.assertEqual(outcome.removed, [], form)
            self.assertEqual(self.world.found(), both, form)
            gone = next(iter(self.archive.pool))
            self.archive.drop(gone)
            self.archive.publish()
            self.merge()
            self.assertEqual(
                self.sync(delete=True, indexes=form).removed, [gone] * (form == "zstd")
            )
            (self.world.directory / "stray").write_bytes(b"x")
            # What is still named by the other suite's indexes of before stays with them.
            outcome = self.sync(suites=("rel",), delete=True, indexes=form)
            self.assertEqual(outcome.removed, ["stray"], form)
            self.assertEqual(gone in self.world.found(), form != "zstd")
            named = {"packed": 2 * 22, "unpacked": 22, "zstd": 0}[form]
            if named:
                self.assertEqual(check_readers(self.world.directory), named)
            self.sync(delete=True, indexes=form)
            self.assertNotIn(gone, self.world.found())

    def test_what_is_to_go(self) -> None:
        """A suite whose indexes were removed goes as a whole."""
        self.sync()
        alone = self.world.found()
        self.sync(suites=("rel",))
        for name in ("Release", "main/binary-amd64/Packages.xz", "main/binary-amd64/Packages.gz"):
            os.unlink(self.world.directory / OTHER / name)
        outcome = self.sync(delete=True)
        self.assertEqual(len([path for path in outcome.removed if "/q/" in path]), 3)
        self.assertEqual(self.world.found(), alone)

    def test_other_names_of_suites(self) -> None:
        """A link beside a suite that leads to it, as debmirror makes them, stays as long as the suite."""
        self.sync()
        self.sync(suites=("rel",))
        for name, target in (
            ("unstable", "sid"),
            ("stable", "rel/"),
            ("lost", "none"),
            ("out", "../.."),
        ):
            (self.world.directory / "dists" / name).symlink_to(target)
        self.assertEqual(self.sync(delete=True).removed, ["dists/lost", "dists/out"])
        for name in ("unstable", "stable"):
            self.assertTrue((self.world.directory / "dists" / name / "Release").exists())

    def test_what_cannot_be_read(self) -> None:
        """Nobody knows what belongs to a suite that is damaged: nothing is removed."""
        self.sync()
        self.sync(suites=("rel",))
        stray = self.world.directory / "stray"
        stray.write_bytes(b"x")
        for name in ("Release", "main/binary-amd64/Packages.xz"):
            path = self.world.directory / OTHER / name
            data = path.read_bytes()
            path.write_bytes(b"junk")
            error = self.assertRaises(MirrorError, self.sync, delete=True)
            self.assertIn(f"{OTHER}/{name} cannot be read", str(error))
            self.assertIn("nothing was removed", str(error))
            path.write_bytes(data)
        self.assertEqual(self.sync(delete=True).removed, ["stray"])


class ComponentsTests(DebianCase):
    """A component a run, of one suite."""

    def setUp(self) -> None:
        self.archive = Archive()
        self.make(self.archive)
        self.contrib(b"contrib")

    def contrib(self, data: bytes) -> None:
        """The mirror has this package in the component ``contrib``."""
        path = CONTRIB_DEB % sha(data)
        text = paragraph(path, data)
        self.archive.further = {CONTRIB: text, CONTRIB + ".xz": lzma.compress(text)}
        self.archive.publish()
        self.world.hosts[0].files = {**self.archive.files, path: data}

    def test_what_is_still_right_stays(self) -> None:
        """Also when packages of the other component change, with and without --delete."""
        self.sync()
        self.sync(components=("contrib",))
        both = self.world.found()
        self.assertIn(f"{SUITE}/main/binary-amd64/Packages.xz", both)
        self.assertEqual(self.sync(delete=True).removed, [])
        self.assertEqual(self.world.found(), both)
        self.archive.add()
        self.contrib(b"contrib")
        self.assertEqual(self.sync(delete=True).removed, [])
        self.assertEqual(check_readers(self.world.directory), 2 * 21 + 1)
        self.assertIn(CONTRIB_DEB % sha(b"contrib"), self.world.found())

    def test_what_would_be_wrong(self) -> None:
        """What a new release file says of the other one's index is brought up to date in the same run."""
        self.sync()
        self.sync(components=("contrib",))
        for number, delete in enumerate((False, True, True)):
            self.contrib(b"another contrib %d" % number)
            self.sync(delete=delete)
            found = self.world.found()
            path = f"{SUITE}/contrib/binary-amd64/Packages.xz"
            self.assertEqual(found[path], self.archive.files[path])
            self.assertEqual(check_readers(self.world.directory), 2 * 20 + 1)
        self.sync(components=("main", "contrib"))
        self.assertEqual(check_readers(self.world.directory), 2 * 20 + 1)

    def test_what_is_beside_an_index(self) -> None:
        """Translations of another run's component stay with it; those of one's own go if not wanted."""
        for name in ("main", "contrib"):
            self.archive.further[f"{name}/i18n/Translation-en.xz"] = lzma.compress(name.encode())
        self.archive.publish()
        host = self.world.hosts[0]
        host.files = {**host.files, **self.archive.files}
        self.sync(also=("*Translation*",))
        self.sync(components=("contrib",), also=("contrib/*Translation*",))
        removed = self.sync(delete=True).removed
        self.assertEqual({path for path in removed if "/contrib/" in path}, set())
        self.assertIn(f"{SUITE}/main/i18n/Translation-en.xz", removed)

    def test_what_is_not_chosen_any_more(self) -> None:
        """What the last run kept together with this one's goes as it is left out, and has no say."""
        self.sync(components=("main", "contrib"))
        self.assertIn(CONTRIB_DEB % sha(b"contrib"), self.sync(delete=True).removed)
        self.assertEqual(check_readers(self.world.directory), 2 * 20)
        self.sync(components=("main", "contrib"))
        self.contrib(b"another contrib")
        self.sync()
        self.assertNotIn(f"{SUITE}/{CONTRIB}.xz", self.world.found())
        check_readers(self.world.directory)

    def test_what_the_archive_has_no_more(self) -> None:
        """An index that the archive has given up goes."""
        self.sync()
        self.sync(components=("contrib",))
        self.archive.further = {}
        self.archive.publish()
        self.world.hosts[0].files = self.archive.files
        self.sync()
        self.assertNotIn(f"{SUITE}/{CONTRIB}.xz", self.world.found())
        self.assertIn(CONTRIB_DEB % sha(b"contrib"), self.sync(delete=True).removed)
