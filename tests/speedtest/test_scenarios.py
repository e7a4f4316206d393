"""What the speed test measures, as numbers."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UsageError
from pipegrid.speedtest import scenarios
from pipegrid.speedtest.run_results import DOWN, GROUPS, SCENARIO, UP, WINDOW, EmulatedLink

DSL = EmulatedLink("dsl", 0.011, 80e3, 520e3)
WAN = EmulatedLink("wan", 0.04, 12.5e6, 12.5e6)


class ScenariosTests(SynchronousTestCase):
    """The lists."""

    def setUp(self) -> None:
        self.full = scenarios.full(WAN, Params(), 10)

    def test_the_full_list_has_everything(self) -> None:
        """The classic names, many files at once, the sweeps, and the command itself."""
        names = [each.name for each in self.full if each.group == SCENARIO]
        classic = ["startup", "1x 200B", "10x 200B", "100x 200B", "1MB", "10MB"]
        more = ["100x 200B at once", "1000 mixed sizes", "100MB"]
        self.assertEqual(names, classic + more)
        windows = [each.window_bytes for each in self.full if each.group == WINDOW]
        self.assertEqual((windows[0], *windows[-2:]), (10_000, 16_000_000, None))
        self.assertEqual({each.group for each in self.full}, set(GROUPS))

    def test_titles_are_unique(self) -> None:
        """Each measurement can be named."""
        for some in (self.full, scenarios.quick(Params(), 10)):
            titles = [each.title for each in some]
            self.assertEqual(len(set(titles)), len(titles))

    def test_mixed_sizes_are_the_same_in_all_runs(self) -> None:
        """Or runs could not be compared; each makes shares, and all magnitudes are there."""
        sizes = scenarios.mixed().sizes
        self.assertEqual(sizes, scenarios.mixed().sizes)
        self.assertEqual(len(sizes), 1000)
        self.assertTrue(100 <= min(sizes) < 150 and 80_000 < max(sizes) <= 100_000)

    def test_encodings_fit_the_servers(self) -> None:
        """No scenario wants more shares than there are servers."""
        made = [each.encoding for each in scenarios.encoding_sweep(10**6, 5)]
        self.assertEqual(made, [(1, 1), (3, 5)])


class BytesTests(SynchronousTestCase):
    """What passes the link, and what stays on the disks."""

    def test_wire_bytes_are_those_of_shares(self) -> None:
        """Ten shares of a third up, three of them down; hash trees included."""
        large = scenarios.large(10**6)
        share = scenarios.share_bytes(10**6, Params())
        self.assertTrue(333_334 < share < 335_000)
        self.assertEqual(large.wire_bytes(UP, Params()), 10 * share)
        self.assertEqual(large.wire_bytes(DOWN, Params()), 3 * share)
        self.assertEqual(scenarios.share_bytes(55, Params()), 0)

    def test_an_encoding_of_its_own_counts(self) -> None:
        """A sweep's point has the bytes of its own k and n."""
        [one, *_] = scenarios.encoding_sweep(3000, 10)
        share = scenarios.share_bytes(3000, Params(1, 1))
        self.assertEqual(one.wire_bytes(UP, Params()), share)

    def test_rounds_and_their_limit(self) -> None:
        """What takes long has fewer rounds; the disk needs one more than is counted."""
        large = scenarios.large(10**6, most_rounds=3)
        self.assertEqual([large.counts_in(number) for number in range(5)], [True] * 3 + [False] * 2)
        self.assertEqual(large.stored_bytes(Params(), 5), 4 * large.wire_bytes(UP, Params()))
        self.assertTrue(scenarios.large(1).counts_in(999))


class LinkTests(SynchronousTestCase):
    """What a link lets through."""

    def test_slow_links_leave_out_what_takes_minutes(self) -> None:
        """100 MB over a DSL line would take more than an hour."""
        within, beyond = scenarios.split_by_duration(
            scenarios.full(DSL, Params(), 10), DSL, Params()
        )
        self.assertIn("1MB", [each.name for each in within])
        self.assertIn("100MB", [each.name for each in beyond])
        full = scenarios.full(None, Params(), 10)
        self.assertEqual(scenarios.split_by_duration(full, None, Params()), (full, []))

    def test_what_takes_long_has_fewer_rounds(self) -> None:
        """At 100 Mbit/s a round of 100 MB takes 35 s: two, where 10 MB have all that are wanted."""
        rounds = {each.title: each.most_rounds for each in scenarios.full(WAN, Params(), 10)}
        self.assertEqual((rounds["100MB"], rounds["100x 200B"]), (2, 3))
        self.assertGreater(rounds["10MB"] or 0, 10)
        unlimited = {each.title: each.most_rounds for each in scenarios.full(None, Params(), 10)}
        self.assertEqual((unlimited["100MB"], unlimited["10MB"]), (3, None))

    def test_the_sweep_fits_the_link(self) -> None:
        """About a second at the link's rate, in a round number of bytes."""
        self.assertEqual(scenarios.sweep_bytes(DSL, Params()), 100_000)
        self.assertEqual(scenarios.sweep_bytes(WAN, Params()), 2 * 10**6)
        fat = EmulatedLink("lfn", 0.2, 125e6, 125e6)
        self.assertEqual(scenarios.sweep_bytes(fat, Params()), 30 * 10**6)


class ChooseTests(SynchronousTestCase):
    """``--only``."""

    def setUp(self) -> None:
        self.full = scenarios.full(WAN, Params(), 10)

    def chosen(self, *wanted: str) -> list[str]:
        """Return the titles that are chosen."""
        return [each.title for each in scenarios.choose(self.full, wanted)]

    def test_names_groups_and_parts(self) -> None:
        """A name is that one, a group all of it, a part whatever has it; in the order of the list."""
        self.assertEqual(len(self.chosen()), len(self.full))
        self.assertEqual(self.chosen("10MB", "1mb"), ["1MB", "10MB"])
        self.assertEqual(self.chosen("window 1MB"), ["window 1MB"])
        self.assertEqual(len(self.chosen("Window")), len(scenarios.WINDOWS) + 1)
        self.assertEqual(self.chosen("at once"), ["100x 200B at once"])

    def test_what_is_none_gets_a_sentence(self) -> None:
        """It says what there is."""
        error = self.assertRaises(UsageError, self.chosen, "1x 300B")
        self.assertIn("startup, 1x 200B", str(error))

    def test_size_names(self) -> None:
        """As they are written here."""
        sizes = (200, 10_000, 50_000, 10**6, 10**8)
        self.assertEqual(
            [scenarios.size_name(size) for size in sizes], ["200B", "10KB", "50KB", "1MB", "100MB"]
        )
