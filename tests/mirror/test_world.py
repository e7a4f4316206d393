"""Some repositories of ``make mirror-world``: by real programs, mirrored, and read by apt and dnf."""

from __future__ import annotations

import shutil

from misc.mirror_world.__main__ import all_cases, check
from twisted.trial.unittest import SynchronousTestCase

APT = ("apt-ftparchive", "dpkg-scanpackages", "apt-get")
DNF = ("createrepo_c", "rpmbuild", "rpmsign", "dnf")


def lacking(programs: tuple[str, ...]) -> str:
    """Return why a test is left out; "": it is not."""
    missing = [each for each in programs if shutil.which(each) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


class WorldTests(SynchronousTestCase):
    """Who reads from the mirror gets what the repository has."""

    def the_same(self, *names: str) -> None:
        """Look that it is so with these."""
        found = {each.name: each for each in all_cases()}
        for name in names:
            self.assertGreater(check(found[name]), 0)

    def test_apt(self) -> None:
        """Two archives with what is unusual, as apt reads them."""
        self.the_same("debian-by-hash-only", "debian-flat-below")

    def test_dnf(self) -> None:
        """A repository with what is unusual, as dnf reads it."""
        self.the_same("rpm-blanks")

    def test_signed_for_apt(self) -> None:
        """apt and the mirror know the key of an archive, and look at its signature."""
        self.the_same("debian-signed-ftparchive", "debian-signed-flat")

    def test_signed_for_dnf(self) -> None:
        """dnf and the mirror look at the signatures of ``repomd.xml`` and of packages."""
        self.the_same("rpm-signed")

    def test_how_many(self) -> None:
        """There are forty and more, each with a name of its own."""
        names = {each.name for each in all_cases()}
        self.assertEqual(len(names), len(all_cases()))
        self.assertGreaterEqual(len(names), 40)

    if skip_apt := lacking(APT):
        test_apt.skip = test_signed_for_apt.skip = skip_apt  # type: ignore[attr-defined]
    if skip_dnf := lacking(DNF):
        test_dnf.skip = test_signed_for_dnf.skip = skip_dnf  # type: ignore[attr-defined]
