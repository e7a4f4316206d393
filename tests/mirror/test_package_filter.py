"""Which packages filters select, in the order of versions that Debian and rpm have."""

from __future__ import annotations

import random
import shutil
import subprocess

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.package_filter import (
    ALL,
    Description,
    Matches,
    PackageFilter,
    compare_debian,
    select,
)


def names(found: PackageFilter, *entries: tuple[str, str, str, str, str]) -> list[str]:
    """Return name and version of what is selected of name, architecture, version, section, priority."""
    given = [(Description(*each), f"{each[0]}_{each[2]}") for each in entries]
    return [text for _, text in select(given, [found], compare_debian)]


class VersionTests(SynchronousTestCase):
    """Debian's order is that of dpkg."""

    def test_known(self) -> None:
        """What deb-version(7) says."""
        rising = (
            "1~~",
            "1~~a",
            "1~",
            "1",
            "1-1",
            "1a",
            "1+b1",
            "1.0",
            "1.2",
            "1.10",
            "2",
            "1:0",
            "10:0~",
        )
        for number, one in enumerate(rising):
            for other in rising[number + 1 :]:
                self.assertEqual((compare_debian(one, other), compare_debian(other, one)), (-1, 1))
        for one, other in (("1.0", "1.00"), ("0:1", "1"), ("1", "1-0"), ("1.0", "1.")):
            self.assertEqual(compare_debian(one, other), 0)

    def test_as_dpkg(self) -> None:
        """Versions at random are in the order that dpkg finds."""
        rng = random.Random(1)
        for _ in range(150):
            one, other = (
                str(rng.randrange(10)) + "".join(rng.choices("019a~+.Zz-", k=rng.randrange(6)))
                for _ in range(2)
            )
            sign = compare_debian(one, other)
            word = {-1: "lt", 0: "eq", 1: "gt"}[sign]
            command = ["dpkg", "--compare-versions", one, word, other]
            done = subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
            self.assertIn(done.returncode, (0, 2), command)  # 2: that is no version

    if shutil.which("dpkg") is None:
        test_as_dpkg.skip = "dpkg not installed"  # type: ignore[attr-defined]


class FilterTests(SynchronousTestCase):
    """Patterns, and the newest versions."""

    PACKAGES = (
        ("a", "amd64", "1", "libs", "required"),
        ("a", "amd64", "1.10", "libs", "required"),
        ("a", "amd64", "1.9", "libs", "required"),
        ("a", "all", "1", "libs", "optional"),
        ("a-dbg", "amd64", "2", "contrib/debug", "extra"),
        ("b", "amd64", "3", "net", "optional"),
    )

    def test_select(self) -> None:
        """Every kind of them, alone and together."""
        for found, selected in (
            (ALL, "a_1 a_1.10 a_1.9 a_1 a-dbg_2 b_3"),
            (PackageFilter(include=("a*",), exclude=("*-dbg",)), "a_1 a_1.10 a_1.9 a_1"),
            (PackageFilter(include=("b", "*dbg")), "a-dbg_2 b_3"),
            (PackageFilter(sections=("debug", "net")), "a-dbg_2 b_3"),
            (PackageFilter(sections=("contrib/*",)), "a-dbg_2"),
            (PackageFilter(priorities=("required",), newest=2), "a_1.10 a_1.9"),
            (PackageFilter(newest=1), "a_1.10 a_1 a-dbg_2 b_3"),
            (PackageFilter(architectures=("all",)), "a_1"),
        ):
            self.assertEqual(names(found, *self.PACKAGES), selected.split(), found)

    def test_unmatched(self) -> None:
        """What matches nothing is known, also of what another pattern excludes."""
        matches = Matches(PackageFilter(include=("a", "x"), exclude=("y", "a"), sections=("z",)))
        for each in self.PACKAGES:
            matches.note(Description(*each))
        self.assertEqual(
            matches.unmatched(), [("--include", "x"), ("--exclude", "y"), ("--section", "z")]
        )
