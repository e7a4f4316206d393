"""The page of a file: previews that run nothing, facts, capabilities, and content that is never a script."""

from __future__ import annotations

from urllib.parse import quote

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, UnknownCap, parse_cap
from pipegrid.gateway.web_ui.object_page import TEXT_BYTES, preview_kind
from tests.gateway.web_ui.test_directory_page import DirectoryTestCase

SCRIPT = b"<script>alert(1)</script>"


class PreviewKindTests(SynchronousTestCase):
    def test_kinds(self) -> None:
        """What browsers show; of everything else there is no preview."""
        for media_type, kind in (
            ("image/png", "image"),
            ("image/svg+xml", "image"),
            ("image/tiff", "none"),
            ("text/html", "text"),
            ("application/json", "text"),
            ("application/atom+xml", "text"),
            ("audio/ogg", "audio"),
            ("video/webm", "video"),
            ("application/pdf", "none"),
            ("application/octet-stream", "none"),
            ("", "none"),
        ):
            self.assertEqual(preview_kind(media_type), kind, media_type)


class FilePageTests(DirectoryTestCase):
    def show_file(self, cap: Cap, name: str = "", **more: Cap) -> None:
        """Open the page of a file in a directory, or alone."""
        start = self.directory_of({name: cap}) if name else cap
        rest = f"/{quote(name, safe='')}" if name else ""
        self.browser.open(f"/uri/{quote(str(start), safe='')}{rest}?t=info")
        self.assertEqual(self.browser.answer.status, 200)
        self.check_page()

    def test_text(self) -> None:
        """It is shown as it is, escaped; also if it is HTML, and with marks that change its direction."""
        self.show_file(self.put(SCRIPT + "\u202e n\u00e4\n\tx".encode()), "a.html")
        shown = self.browser.page.one("pre")
        self.assertEqual(
            "".join(map(str, shown.children)).lstrip("\n"), SCRIPT.decode() + "\\u202e n\u00e4\n\tx"
        )
        self.assertEqual(len(list(self.browser.page.all("script"))), 1)

    def test_long_text(self) -> None:
        """Only its begin is fetched; a character that is cut in two is left out."""
        self.show_file(self.put(("\u20ac" * TEXT_BYTES).encode()), "long.txt")
        self.assertEqual(self.browser.page.one("pre").text, "\u20ac" * (TEXT_BYTES // 3))
        self.assertIn("The begin of the file.", self.browser.text)
        self.browser.follow("Download")
        self.assertEqual(len(self.browser.answer.body), 3 * TEXT_BYTES)

    def test_no_text(self) -> None:
        """What is not text, and what is empty."""
        self.show_file(self.put(b"\0\1\2" * 100), "x.txt")
        self.assertIn("There is no preview", self.browser.text)
        self.show_file(parse_cap("URI:LIT:"), "x.txt")
        self.assertIn("This file is empty.", self.browser.text)

    def test_media(self) -> None:
        """They are loaded by their read cap, in ranges, and no server is asked for the page itself."""
        cap = self.put(b"RIFF" * 100)
        for name, tag in (
            ("a.png", "img"),
            ("a.ogg", "audio"),
            ("a.webm", "video"),
            ("a.svg", "img"),
        ):
            self.show_file(cap, name)
            [media] = self.browser.page.one("figure").all(tag)
            source = media.attributes["src"]
            self.assertNotIn("DIR2", source)
            answer = self.get(source, Range="bytes=4-7", Sec_Fetch_Dest=tag)
            self.assertEqual((answer.status, answer.body), (206, b"RIFF"))

    def test_lost_file(self) -> None:
        """The page says that it cannot be read; and still what is known of it."""
        cap = self.put(b"x" * 100)
        self.delete_shares(cap)
        self.show_file(cap, "a.txt")
        self.assertIn("100 bytes", self.browser.text)
        self.assertIn("share", self.browser.page.one("figure").text)

    def test_mutable(self) -> None:
        """Its content is replaced by a form; with its read cap there is none."""
        cap = self.world.run(self.grid.create_mutable(b"old")).cap
        self.show_file(cap, "a.txt")
        self.assertIn("3 bytes", self.browser.text)
        self.browser.submit("Replace the content", ("x", b"newer"))
        self.check_page()
        self.assertEqual(self.browser.message, "The file has its new content.")
        self.assertEqual(self.browser.page.one("pre").text, "newer")
        self.show_file(cap.readonly())
        self.assertEqual(list(self.browser.page.all("form")), [])

    def test_capabilities(self) -> None:
        """Those that derive from the one in the address, and what each grants."""
        cap = self.world.run(self.grid.create_mutable(b"x")).cap
        self.show_file(cap)
        shown = [node.text for node in self.browser.page.all("code", class_="cap")]
        self.assertEqual(shown, [str(cap), str(cap.readonly()), str(cap.verifier())])
        self.show_file(cap.readonly())
        self.assertNotIn(str(cap).encode(), self.browser.answer.body)

    def test_unknown(self) -> None:
        """What this version does not know, and verify caps, which read nothing."""
        verifier = self.verify_cap()
        for cap in (UnknownCap("ro.URI:FUTURE:<b>"), verifier):
            self.show_file(cap)
            self.assertNotIn("Download", self.browser.text)
            self.assertIn(str(cap), self.browser.text)
        self.show_file(UnknownCap("ro.URI:FUTURE:" + "x" * 10_000))
        self.assertLess(len(self.browser.answer.body), 10_000)

    def test_directory(self) -> None:
        """Of a directory as well; it leads to its entries."""
        cap = self.directory_of({"a": parse_cap("URI:LIT:nbswy3dp")})
        self.browser.open(f"/uri/{cap}/?t=info")
        self.check_page()
        self.browser.follow("Open")
        self.assertEqual(self.shown_names(), ["a"])

    def test_content_is_no_script(self) -> None:
        """Whatever its name or type, a page cannot run it or use it as a style; nor can it run by itself."""
        cap = self.put(b"alert(1) /* " + b"x" * 100)
        for path in (f"/uri/{cap}?filename=a.js", f"/named/{cap}/a.css", f"/named/{cap}/x.html"):
            answer = self.get(path)
            self.assertEqual(answer.status, 200)
            self.assertTrue(answer.headers["content-security-policy"].startswith("sandbox;"))
            self.assertEqual(answer.headers["x-content-type-options"], "nosniff")
            for use in ("script", "style", "worker", "serviceworker", "object", "embed", "iframe"):
                self.assertEqual(self.get(path, Sec_Fetch_Dest=use).status, 403, use)
            for use in ("document", "image", "empty", "audio", "video"):
                self.assertEqual(self.get(path, Sec_Fetch_Dest=use).status, 200, use)
