"""NURLs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.wire import server_address
from pipegrid.wire.server_address import Nurl
from tests import vectors

SPKI = "-HM9LypH5BEvcBEABE7O4GbS1ZI6zgisoROVX373SzM"


class NurlTests(SynchronousTestCase):
    """What NURLs say, and what is none."""

    def test_a_real_servers_nurl(self) -> None:
        """The recorded server's NURL has an address, and the swissnum of its fURL."""
        recorded = vectors.load("gbs-http")
        parsed = server_address.parse_nurl(recorded["nurls"][0])
        self.assertEqual((parsed.host, parsed.port, parsed.tor), ("127.0.0.1", 39472, False))
        self.assertEqual(parsed.swissnum, recorded["furl"].rpartition("/")[2])
        self.assertEqual(str(parsed), recorded["nurls"][0])

    def test_ipv6_stands_in_brackets(self) -> None:
        """An IPv6 address loses its brackets when parsed and gets them back."""
        text = f"pb://{SPKI}@[2001:db8::1]:443/secret#v=1"
        self.assertEqual(server_address.parse_nurl(text).host, "2001:db8::1")
        self.assertEqual(str(server_address.parse_nurl(text)), text)

    def test_tor_is_recognised(self) -> None:
        """The Tor form leads to an .onion name and nowhere else."""
        text = f"pb+tor://{SPKI}@{'a' * 56}.onion:3457/secret#v=1"
        self.assertTrue(server_address.parse_nurl(text).tor)
        self.assertEqual(str(server_address.parse_nurl(text)), text)
        with self.assertRaises(UsageError):
            server_address.parse_nurl(f"pb+tor://{SPKI}@example.org:3457/secret#v=1")

    def test_what_is_no_nurl(self) -> None:
        """Whatever is not spelt exactly so is refused, without repeating the secret."""
        good = f"pb://{SPKI}@host:1/geheim#v=1"
        server_address.parse_nurl(good)
        for bad in (
            "",
            good[:-4],  # that would be a fURL
            good.replace("v=1", "v=2"),
            good.replace("pb://", "http://"),
            good.replace("pb://", "PB://"),
            good.replace(SPKI, SPKI[:-1]),
            good.replace(SPKI, SPKI + "A"),
            good.replace(SPKI, SPKI[:-1] + "N"),  # stray bits
            good.replace(SPKI, SPKI[:-1] + "="),
            good.replace(":1/", ":0/"),
            good.replace(":1/", ":65536/"),
            good.replace(":1/", ":-1/"),
            good.replace(":1/", "/"),
            good.replace("host", ""),
            good.replace("host", "::1"),
            good.replace("host", "[host]"),
            good.replace("host", "[1:2]"),
            good.replace("host", "ho st"),
            good.replace("geheim", ""),
            good.replace("geheim", "geheim/mehr"),
            good.replace("geheim", "geheim?x"),
            good.replace("geheim", "geheim\n"),
            good.replace("geheim", "gehe\xefm"),
            good + "\n",
            " " + good,
            good.replace("geheim", "geheim" * 1000),
        ):
            error = self.assertRaises(UsageError, server_address.parse_nurl, bad)
            self.assertNotIn("geheim", str(error), bad)
            self.assertNotIn("geheim", repr(server_address.parse_nurl(good)))

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(
        spki_hash=st.binary(min_size=32, max_size=32),
        host=st.sampled_from(["a", "storage.example.org", "10.0.0.1", "::1", "fe80::1:2"]),
        port=st.integers(1, 65535),
        swissnum=st.text("abcdefghijklmnopqrstuvwxyz234567-_", min_size=1, max_size=40),
    )
    def test_formatting_and_parsing_agree(
        self, spki_hash: bytes, host: str, port: int, swissnum: str
    ) -> None:
        """Every NURL comes back from its text."""
        address = Nurl(spki_hash, host, port, swissnum)
        self.assertEqual(server_address.parse_nurl(str(address)), address)

    def test_recognising_a_certificate(self) -> None:
        """Only the very hash is recognised."""
        address = server_address.parse_nurl(f"pb://{SPKI}@host:1/s#v=1")
        self.assertTrue(address.recognises(address.spki_hash))
        self.assertFalse(address.recognises(b"\0" * 32))
        self.assertFalse(address.recognises(b""))
