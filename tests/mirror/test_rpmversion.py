"""Which version is newer."""

from __future__ import annotations

from functools import cmp_to_key
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.rpm_metadata import RpmVersion, compare, compare_versions

# Each row from the oldest to the newest. rpm 4.18 agrees (tests.interop.reposync asks it).
ROWS = (
    ("1.0~~", "1.0~beta", "1.0~beta.1", "1.0~rc1", "1.0~rc1^git1", "1.0~rc2", "1.0", "1.0^git1"),
    ("1.0^git1~x", "1.0^git1", "1.0^git1.1", "1.0^git2", "1.0.1", "1.1", "1.10", "2"),
    ("5.5p1", "5.5p2", "5.5p10", "5.6p1"),
    ("~", "", "^", "a", "aa", "b", "b1", "0", "0a", "0.0", "1", "9" * 50, "1" + "0" * 50),
)
SAME = (
    ("1.0", "1.00"),
    ("2_0", "2.0"),
    ("a.b", "a+b"),
    ("1.", "1"),
    ("1..2", "1.2"),
    ("0010", "10"),
    ("é1", "1"),
    ("1.0~", "1.0.~"),
)

TEXTS = st.text("019abAZ.~^-_+é", max_size=8)

# A machine that is busy draws slowly, too.
PROPERTY = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


class CompareTests(SynchronousTestCase):
    """One part."""

    def test_known(self) -> None:
        """What is known to be newer is, also behind others in between."""
        for row in ROWS:
            for place, one in enumerate(row):
                for other_place, other in enumerate(row):
                    sign = (place > other_place) - (place < other_place)
                    self.assertEqual(compare(one, other), sign, (one, other))
        for one, other in SAME:
            self.assertEqual((compare(one, other), compare(other, one)), (0, 0), (one, other))

    @PROPERTY
    @given(TEXTS, TEXTS)
    def test_turned_round(self, one: str, other: str) -> None:
        """Who is older is not newer."""
        self.assertEqual(compare(one, other), -compare(other, one))
        self.assertEqual(compare(one, one), 0)

    @PROPERTY
    @given(st.lists(TEXTS, min_size=3, max_size=3))
    def test_order(self, texts: list[str]) -> None:
        """It is an order: what is not newer than the second is not newer than the third."""
        versions = sorted(
            (RpmVersion("0", text, "1") for text in texts), key=cmp_to_key(compare_versions)
        )
        for one, other in pairwise(versions):
            self.assertLessEqual(compare_versions(one, other), 0)
        self.assertLessEqual(compare_versions(versions[0], versions[2]), 0)

    def test_parts(self) -> None:
        """An epoch counts first, and none is 0; then the version, then the release."""
        row = [
            RpmVersion(*each)
            for each in (("", "1", "9"), ("0", "2", "1"), ("0", "2", "2"), ("1", "0", "0"))
        ]
        self.assertEqual(sorted([*row[2:], *row[:2]], key=cmp_to_key(compare_versions)), row)
        self.assertEqual(compare_versions(RpmVersion("", "1", "1"), RpmVersion("0", "1", "1")), 0)
