"""The page that shares an object: only what reads it is on the page."""

from __future__ import annotations

import re

import segno
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, UnknownCap, parse_cap
from pipegrid.gateway.web_ui.read_cap_page import MOST_CODE_CHARACTERS, qr_code
from tests.gateway.web_ui.page_browser import parse_page
from tests.gateway.web_ui.test_directory_page import DirectoryTestCase

LIT = parse_cap("URI:LIT:nbswy3dp")
_RUN = re.compile(r"M(\d+) (\d+)h(\d+)v1h-\d+z")


class QrCodeTests(SynchronousTestCase):
    def test_modules(self) -> None:
        """Every dark module is drawn, and no other, inside a border of four."""
        text = "URI:CHK:" + "a" * 90
        drawn = qr_code(text)
        assert drawn is not None
        [_, path] = parse_page(drawn).all("path")
        dark = {
            (x, int(y))
            for begin, y, length in _RUN.findall(path.attributes["d"])
            for x in range(int(begin), int(begin) + int(length))
        }
        rows = segno.make(text, error="m", micro=False).matrix
        expected = {
            (x + 4, y + 4) for y, row in enumerate(rows) for x, module in enumerate(row) if module
        }
        self.assertEqual(dark, expected)

    def test_too_long(self) -> None:
        self.assertIsNotNone(qr_code("x" * MOST_CODE_CHARACTERS))
        self.assertIsNone(qr_code("x" * (MOST_CODE_CHARACTERS + 1)))


class SharePageTests(DirectoryTestCase):
    def share(self, cap: Cap, name: str) -> None:
        """Open the page by the link in the directory's page."""
        self.show(self.directory_of({name: cap}))
        self.browser.follow(f"Share {name}")
        self.assertEqual(self.browser.answer.status, 200)
        self.check_page()

    def test_file(self) -> None:
        """The link leads to the file, by its own cap."""
        self.share(LIT, "a b.txt")
        self.assertIn("a b.txt", self.browser.text)
        self.browser.open(self.browser.page.one("a", class_="cap").attributes["href"])
        self.assertEqual(self.browser.answer.body, b"hello")

    def test_directory(self) -> None:
        """The cap that writes is not on the page, nor in its address."""
        inner = self.directory_of({"x": LIT})
        self.share(inner, "inner")
        secret = str(inner).split(":")[2]
        self.assertNotIn(secret.encode(), self.browser.answer.body)
        self.assertNotIn(secret, self.browser.url)
        self.assertIn(str(inner.readonly()), self.browser.text)
        self.assertIn("now and after later changes", self.browser.text)
        self.browser.open(self.browser.page.one("a", class_="cap").attributes["href"])
        self.check_page()
        self.assertEqual(self.shown_names(), ["x"])

    def test_way_back(self) -> None:
        self.share(LIT, "a.txt")
        self.browser.follow("To the file")
        self.check_page()
        self.assertEqual(self.browser.page.one("h1").text, "a.txt")

    def test_addresses(self) -> None:
        """Loopback's is of no use to others, so the code has the cap; another one it has."""
        local = self.browser.open(f"/uri/{LIT}?t=share").text
        self.assertIn("This link works on this machine alone", local)
        answer = self.get(f"/uri/{LIT}?t=share", Host="192.0.2.1")
        self.assertEqual(answer.status, 403)

    def test_not_shared(self) -> None:
        """What nothing is known to read."""
        verifier = self.verify_cap()
        for cap in (UnknownCap("ro.URI:FUTURE:x"), verifier):
            self.browser.open(f"/uri/{cap}?t=share")
            self.assertEqual(self.browser.answer.status, 400)
            self.check_page()
