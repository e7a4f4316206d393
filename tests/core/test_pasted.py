"""Caps that come out of mails and browsers."""

from __future__ import annotations

from urllib.parse import quote

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.text import as_pasted

CAP = "URI:CHK:psjrylnr7572oui2uye77sfrym:jpzk5if2lembkejzgsta6c4pbkfgeo6xrhhh5nlh44jlf7weccgq:3:10:3000000"
DIRECTORY = (
    "URI:DIR2-RO:wgvnwpdg3nexewdbmm4staqdsa:uf7wytdqxdcyz76pcehn2i2wbdf3jk6s6vigtuf7kvjwbg3dw4ga"
)


class PastedTests(SynchronousTestCase):
    """What is left of text, and what is left alone."""

    def test_mails(self) -> None:
        """Quotation marks, brackets and broken lines."""
        for text in (
            f" {CAP}\r\n",
            f'"{CAP}"',
            f"'{CAP}'",
            f"<{CAP}>",
            f"\u201c{CAP}\u201d",
            f"> {CAP}",
            f">> <{CAP}>",
            f"{CAP[:70]}\n{CAP[70:]}",
            f"> {CAP[:50]}\r\n> {CAP[50:70]}\r\n> {CAP[70:]}\r\n",
        ):
            self.assertEqual(as_pasted(text), CAP, text)

    def test_gateways(self) -> None:
        """Addresses of pages, as browsers show and servers print them."""
        quoted = quote(CAP, safe="")
        for text in (
            quoted,
            f"http://127.0.0.1:3456/uri/{quoted}",
            f"http://127.0.0.1:3456/uri/{CAP}",
            f"https://gateway.example/file/{quoted}/@@named=/holiday.jpg",
            f"<http://[::1]:3456/uri/{quoted}?t=info#top>",
        ):
            self.assertEqual(as_pasted(text), CAP, text)
        below = f"http://127.0.0.1:3456/uri/{quote(DIRECTORY, safe='')}/a%20b/caf%C3%A9/"
        self.assertEqual(as_pasted(below), f"{DIRECTORY}/a b/caf\u00e9/")

    def test_what_is_something_else(self) -> None:
        """Paths with odd names, aliases and addresses of other pages stay as they are."""
        for text in (
            f"{DIRECTORY}/50%25",
            f"{DIRECTORY}/two\nlines",
            f'{DIRECTORY}/"said"',
            "home:URI%3A",
            '"home":x',
            "http://127.0.0.1:3456/status",
            "http://127.0.0.1:3456/uri/plain",
            f"http://127.0.0.1:3456/uri/{quote(DIRECTORY, safe='')}/a%2Fb",
            "",
            ">",
            '"',
        ):
            self.assertEqual(as_pasted(text), text, text)
        self.assertEqual(as_pasted(as_pasted(f'"{CAP}"')), CAP)
