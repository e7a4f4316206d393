"""What all pages have in common: headers, escapes, assets, and errors that lead back."""

from __future__ import annotations

import gzip
import re

from jinja2 import UndefinedError
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import parse_cap
from pipegrid.gateway.web_ui.assets import assets
from pipegrid.gateway.web_ui.page_templates import (
    as_time,
    render_page,
    shown_date,
    shown_millis,
    shown_name,
    way_back,
)
from tests.gateway.web_ui.interface_world import InterfaceTestCase
from tests.gateway.web_ui.page_browser import parse_page

EVIL = '"><script>alert(1)</script>\u202e'


class PageTemplatesTests(SynchronousTestCase):
    def test_values_are_escaped(self) -> None:
        """Marks of direction as well, so that a page shows a name as it is; pages are ASCII."""
        page = render_page("error.html", {"title": EVIL, "text": "näch", "back": EVIL})
        self.assertNotIn(b"<script>", page.data)
        self.assertTrue(page.data.isascii())
        parsed = parse_page(page.data.decode())
        self.assertEqual(parsed.one("h1").text, EVIL)
        self.assertEqual(parsed.one("p", class_="lead").text, "näch")
        self.assertIn(r"\u202e", parsed.one("title").text)

    def test_missing_values(self) -> None:
        """A value that a template needs is not left out in silence."""
        with self.assertRaises(UndefinedError):
            render_page("error.html", {"title": "x"})

    def test_names(self) -> None:
        self.assertEqual(shown_name("a\nb\u202etxt.exe"), r"a\nb\u202etxt.exe")
        self.assertEqual(shown_name("x" * 160), "x" * 160)
        self.assertEqual(len(shown_name("x" * 5000)), 161)

    def test_dates_and_durations(self) -> None:
        """What is none is not shown, whatever the metadata of a child say."""
        self.assertEqual(shown_date(1_700_000_000.5), "2023-11-14 22:13")
        values: list[object] = [
            None,
            True,
            "x",
            1e300,
            float("nan"),
            float("inf"),
            -1e300,
            [],
            10**400,
        ]
        for wrong in values:
            self.assertIsNone(as_time(wrong))
        self.assertEqual(shown_date(None), "")
        self.assertEqual(
            [shown_millis(each) for each in (0.0004, 0.1004, None)], ["0.4 ms", "100 ms", ""]
        )

    def test_way_back(self) -> None:
        """To the directory that a form belongs to, or that a child was looked for in."""
        for method, path, back in (
            (b"POST", b"/uri/URI%3ADIR2", "/uri/URI%3ADIR2/"),
            (b"GET", b"/uri/URI%3ADIR2/a%20b/c", "/uri/URI%3ADIR2/a%20b/"),
            (b"GET", b"/uri/URI%3ADIR2", "/"),
            (b"GET", b"/nothing", "/"),
            (b"POST", b"/uri", "/"),
            (b"GET", b'/uri/"><script>/x', "/uri/%22%3E%3Cscript%3E/"),
        ):
            self.assertEqual(way_back(method, path), back)


class ContrastTests(SynchronousTestCase):
    """The colours of the style sheet: 4.5 for text, 3 for frames of controls (WCAG 2.2, 1.4.3, 1.4.11)."""

    TEXT = (
        "text page, text surface, text sunken, text tint, quiet page, quiet surface, quiet sunken, "
        "accent page, accent surface, accent sunken, accent tint, accent-hover page, accent-hover tint, "
        "on-accent accent, on-accent accent-hover, good good-tint, warn warn-tint, bad bad-tint, bad surface"
    )
    FRAMES = "line-strong page, line-strong surface, accent page, accent surface"

    def test_contrast(self) -> None:
        """In light and in dark."""
        sheet = assets()["interface.css"].data.decode("utf-8")
        light, dark = re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)[:2]
        for block in (light, light + dark):
            colours = dict(re.findall(r"--([a-z-]+): #([0-9a-f]{6});", block))
            for pairs, least in ((self.TEXT, 4.5), (self.FRAMES, 3.0)):
                for pair in pairs.split(", "):
                    first, second = (luminance(colours[name]) for name in pair.split())
                    ratio = (max(first, second) + 0.05) / (min(first, second) + 0.05)
                    self.assertGreaterEqual(ratio, least, pair)


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour in six hexadecimal digits."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class ErrorPagesTests(InterfaceTestCase):
    def test_error_page(self) -> None:
        """A browser gets a page, in plain words, from which it gets back."""
        directory = self.make_directory(a=parse_cap("URI:LIT:nbswy3dp"))
        self.browser.open(f"/uri/{directory}/missing")
        self.assertEqual(self.browser.answer.status, 404)
        self.check_page()
        self.assertEqual(self.browser.page.one("h1").text, "Not found")
        self.assertIn("There is no entry of this name: missing.", self.browser.text)
        self.browser.follow("Go back")
        self.assertEqual(self.browser.answer.status, 200)

    def test_programs_get_text(self) -> None:
        """What they look for is in it; so it is without ``Accept``, and with that of curl."""
        directory = self.make_directory()
        for accept in ({}, {"Accept": "*/*"}, {"Accept": "text/plain, application/octet-stream"}):
            answer = self.get(f"/uri/{directory}/missing", **accept)
            self.assertEqual(answer.headers["content-type"], "text/plain;charset=utf-8")
            self.assertEqual(answer.body, b"No such child: missing")

    def test_script_in_a_name(self) -> None:
        """Neither in the path of a missing child, nor in that of a page."""
        self.browser.open("/uri/URI:DIR2-LIT:/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
        self.assertEqual(self.browser.answer.status, 404)
        self.assertNotIn(b"<script>", self.browser.answer.body)
        self.check_page()

    def test_words_for_programs(self) -> None:
        """They are left out of the page."""
        cap = self.put(b"x" * 100)
        self.delete_shares(cap)
        self.browser.open(f"/uri/{cap}")
        self.assertEqual(self.browser.answer.status, 410)
        self.check_page()
        self.assertNotIn("Error", self.browser.text)
        self.assertIn("Too few shares are left", self.browser.text)

    def test_foreign_forms(self) -> None:
        """A form of another site is refused, with a page that says so."""
        directory = self.make_directory()
        answer = self.send(
            f"POST /uri/{directory}?t=mkdir&name=x HTTP/1.1\r\nHost: 127.0.0.1:3456\r\n"
            "Origin: https://evil.example\r\nAccept: text/html\r\nContent-Length: 0\r\n\r\n".encode()
        )
        self.assertEqual(answer.status, 403)
        self.assertIn(b"A page of another site may not change anything", answer.body)
        self.assertEqual(self.world.run(self.grid.directory(directory).list()), {})


class AssetsTests(InterfaceTestCase):
    def test_assets(self) -> None:
        """Each is kept by browsers for a year, since its URL changes with its content."""
        self.assertEqual(set(assets()), {"interface.css", "interface.js", "icon.svg"})
        for asset in assets().values():
            answer = self.get(asset.path)
            self.assertEqual((answer.status, answer.body), (200, asset.data))
            self.assertIn("immutable", answer.headers["cache-control"])
            packed = self.get(asset.path, Accept_Encoding="br, gzip")
            self.assertEqual(gzip.decompress(packed.body), asset.data)
            self.assertEqual(packed.headers["content-type"], asset.content_type)

    def test_nothing_else(self) -> None:
        for path in ("/interface/", "/interface/interface.css", "/interface/..%2fsetup.cfg"):
            self.assertEqual(self.get(path).status, 404)

    def test_nothing_from_outside(self) -> None:
        """No asset names another site."""
        for asset in assets().values():
            text = asset.data.replace(b"http://www.w3.org/", b"")
            self.assertNotIn(b"http", text, asset.path)
            self.assertNotIn(b"//cdn", text, asset.path)
