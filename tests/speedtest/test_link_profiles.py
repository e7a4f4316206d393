"""Links have names, and are written as people write them; whatever else is said gets a sentence."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.speedtest.link_proxies import (
    PROFILES,
    describe,
    make_link,
    parse_rate,
    parse_time,
    shape_of,
)
from pipegrid.speedtest.run_results import EmulatedLink
from pipegrid.testing.link_relay import LinkShape


class UnitsTests(SynchronousTestCase):
    """Times and rates."""

    def test_times(self) -> None:
        """Microseconds, milliseconds and seconds, with or without a fraction or a blank."""
        for text, seconds in (
            ("11ms", 0.011),
            ("0.12ms", 0.00012),
            ("120us", 0.00012),
            ("120µs", 0.00012),
            (".2 s", 0.2),
            (" 0ms", 0.0),
            ("60s", 60.0),
        ):
            self.assertAlmostEqual(parse_time(text), seconds, 12, text)

    def test_rates_are_decimal(self) -> None:
        """A kB is 1000 bytes, and eight bits are a byte."""
        for text, rate in (
            ("80kB/s", 80_000),
            ("80KB/s", 80_000),
            ("80kBps", 80_000),
            ("10Mbit/s", 1_250_000),
            ("1Gbit/s", 125_000_000),
            ("2.5 MB/s", 2_500_000),
            ("800bit/s", 100),
            ("1B/s", 1),
        ):
            self.assertEqual(parse_rate(text), rate, text)
        self.assertIsNone(parse_rate("unlimited"))

    def test_what_is_no_time_gets_a_sentence(self) -> None:
        """So does one without a unit: nobody could know what was meant."""
        for text in (
            "",
            "11",
            "ms",
            "11 m",
            "-1ms",
            "1e3ms",
            "61s",
            "1,5ms",
            "nan",
            "inf s",
            "٣ms",
        ):
            error = self.assertRaises(UsageError, parse_time, text)
            self.assertIn("11ms", str(error), text)

    def test_what_is_no_rate_gets_a_sentence(self) -> None:
        """So does ``b``, which is a bit to some and a byte to others."""
        for text in (
            "",
            "80",
            "80kB",
            "10Mb/s",
            "10mbit/s",
            "0B/s",
            "4bit/s",
            "-1B/s",
            "9999999GB/s",
        ):
            error = self.assertRaises(UsageError, parse_rate, text)
            self.assertIn("80kB/s", str(error), text)


class LinkTests(SynchronousTestCase):
    """What the options ask for."""

    def test_no_options_no_link(self) -> None:
        """The network stays as it is."""
        self.assertIsNone(make_link())

    def test_the_dsl_profile_is_what_its_options_say(self) -> None:
        """Only the name differs."""
        custom = make_link(rtt="11ms", up="80kB/s", down="520kB/s")
        self.assertEqual(custom, EmulatedLink("custom", 0.011, 80e3, 520e3))
        self.assertEqual(make_link("dsl"), EmulatedLink("dsl", 0.011, 80e3, 520e3))

    def test_a_profile_can_be_changed(self) -> None:
        """Then it is no longer called by its name."""
        self.assertEqual(make_link("colo", up="1MB/s"), EmulatedLink("custom", 0.00012, 1e6, None))
        self.assertEqual(
            make_link("dsl", down="unlimited"), EmulatedLink("custom", 0.011, 80e3, None)
        )
        self.assertEqual(make_link("dsl", rtt="11ms"), PROFILES["dsl"])

    def test_an_unknown_profile_names_the_known_ones(self) -> None:
        """All of them."""
        error = self.assertRaises(UsageError, make_link, "isdn")
        for name in PROFILES:
            self.assertIn(name, str(error))

    def test_the_relay_counts_whole_bytes(self) -> None:
        """At least one a second."""
        self.assertEqual(shape_of(EmulatedLink("custom", 0.1, 1.4, None)), LinkShape(0.1, 1, None))
        self.assertEqual(shape_of(PROFILES["lfn"]), LinkShape(0.2, 125_000_000, 125_000_000))

    def test_a_link_in_words(self) -> None:
        """For reports."""
        self.assertEqual(describe(PROFILES["dsl"]), "dsl (11 ms, 80 kB/s up, 520 kB/s down)")
        self.assertEqual(describe(PROFILES["colo"]), "colo (0.12 ms, unlimited up, unlimited down)")
        self.assertEqual(describe(PROFILES["wan"]), "wan (40 ms, 12.5 MB/s up, 12.5 MB/s down)")
        self.assertEqual(describe(None), "the network as it is")
