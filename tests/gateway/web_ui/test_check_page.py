"""Pages of checks, backups, transfers and running uploads, without a browser and without scripts."""

from __future__ import annotations

import json

from pipegrid.core.caps import DirectoryCap, LitCap
from pipegrid.core.mutable.directory_content_edits import Link
from pipegrid.gateway.http_response import WebError
from pipegrid.gateway.web_ui import transfers_page
from pipegrid.gateway.web_ui.transfers_page import UploadProgress
from tests.gateway.gateway_world import CHK_DATA
from tests.gateway.web_ui.interface_world import InterfaceTestCase

LARGE = bytes(range(256)) * 2048


class CheckPageTests(InterfaceTestCase):
    """Check and repair, of a file and of a tree."""

    def setUp(self) -> None:
        super().setUp()
        self.chk = self.put(CHK_DATA)
        self.root = self.make_directory(**{"a <b>": self.chk}, lit=LitCap(b"x"))

    def check_tree(self) -> None:
        """Begin a check of the tree, and load its page until it has ended."""
        self.browser.open(f"/uri/{self.root}/?t=check-form")
        self.check_page()
        self.browser.submit("Check all of it")
        for _ in range(20):
            self.check_page()
            if "finished" in self.browser.text:
                return
            self.world.clock.advance(0.05)
            self.browser.follow("Refresh")
        self.fail(f"it did not end: {self.browser.text}")

    def test_healthy_tree(self) -> None:
        self.check_tree()
        self.assertIn("2 objects of 2 checked: none damaged", self.browser.text)
        self.assertNotIn("Repair", self.browser.text)

    def test_damaged_tree(self) -> None:
        """It names what is damaged, and repairs it."""
        self.delete_shares(self.chk, keep=4)
        self.check_tree()
        self.assertIn("2 objects of 2 checked: 1 damaged", self.browser.text)
        self.assertIn("4 shares", self.browser.row("a <b>").text)
        self.browser.submit("Repair what is damaged")
        while "finished" not in self.browser.text:
            self.world.clock.advance(0.05)
            self.browser.follow("Refresh")
        self.assertIn("1 damaged, 1 repaired", self.browser.text)
        self.check_tree()
        self.assertIn("none damaged", self.browser.text)

    def test_lost_file(self) -> None:
        self.delete_shares(self.chk, keep=1)
        self.check_tree()
        self.assertIn("cannot be restored", self.browser.row("a <b>").text)

    def test_cancel(self) -> None:
        """It ends at once, and its page is gone."""
        self.browser.open(f"/uri/{self.root}/?t=check-form").submit("Check all of it")
        url = self.browser.path
        self.assertIn("running", self.browser.text)
        self.browser.submit("Cancel")
        self.assertIn("was cancelled", self.browser.text)
        self.check_page()
        self.assertEqual(self.browser.open(url).answer.status, 404)

    def test_one_file(self) -> None:
        """It is checked in one request; what is damaged is repaired by another."""
        url = f"/uri/{self.root}/a%20%3Cb%3E"
        self.browser.open(f"{url}?t=check-form").submit("Check it")
        self.check_page()
        self.assertIn("healthy", self.browser.text)
        self.delete_shares(self.chk, keep=4)
        self.browser.open(f"{url}?t=check-form").submit("Check it")
        self.assertIn("damaged", self.browser.text)
        self.browser.submit("Repair it")
        self.check_page()
        self.assertIn("The repair was successful.", self.browser.text)

    def test_no_secret_is_logged(self) -> None:
        self.check_tree()
        self.assertNotIn("URI:", "".join(self.lines))
        self.assertNotRegex("".join(self.lines), r"operations/[^\[]")


class StoredFileTests(InterfaceTestCase):
    def test_a_file_that_the_browser_has(self) -> None:
        """The headers of a 304 become those of the stored response, so the sandbox is among them."""
        cap = self.put(b"<script>" * 20)
        first = self.get(f"/uri/{cap}?filename=a.html")
        again = self.get(f"/uri/{cap}?filename=a.html", If_None_Match=first.headers["etag"])
        self.assertEqual(again.status, 304)
        for name in ("content-security-policy", "x-content-type-options"):
            self.assertEqual(again.headers[name], first.headers[name])
        self.assertTrue(again.headers["content-security-policy"].startswith("sandbox;"))


class BackupPageTests(InterfaceTestCase):
    """The runs of a backup, by date."""

    def stored_tree(self) -> DirectoryCap:
        return self.make_directory(file=self.put(CHK_DATA))

    def test_archives(self) -> None:
        """Those of Tahoe-LAFS, at the directory that has them and at ``Archives`` itself."""
        tree = self.stored_tree()
        times = ("2026-11-22_18:23:31Z", "2026-11-23_02:00:00Z", "2026-11-23_03:00:00Z")
        archives = self.make_directory(**dict.fromkeys(times, tree), other=tree)
        for root in (self.make_directory(Archives=archives, Latest=tree), archives):
            self.browser.open(f"/uri/{root}/?t=backups")
            self.check_page()
            self.assertIn("3 backups", self.browser.text)
            days = [each.text for each in self.browser.page.all("caption")]
            self.assertEqual(days, ["2026-11-23", "2026-11-22"])
            url = self.browser.link("Download the backup of 2026-11-22 18:23:31")
            self.assertEqual(self.get(url).status, 200)

    def test_catalogue(self) -> None:
        """That of ``pipegrid backup`` says more of each run; what makes no sense in it is left out."""
        root = self.make_directory()
        said = {"files": 12, "bytes": 3_000_000, "left_out": 1}
        entries = {
            "home 2026-11-22_18:23:31Z": said,
            "mail 2026-11-22_18:23:31Z": {"files": -1, "bytes": "x"},
            "mail at noon": said,
        }
        links = [
            Link(name, self.stored_tree(), metadata={"pipegrid": {"backup": each}})
            for name, each in entries.items()
        ]
        self.world.run(self.grid.directory(root).change(links))
        self.browser.open(f"/uri/{root}/?t=backups")
        self.check_page()
        self.assertIn("2 backups", self.browser.text)
        self.assertIn("12", self.browser.row("18:23:31 on 2026-11-22, home").text)
        mail = self.browser.row("18:23:31 on 2026-11-22, mail").text
        self.assertEqual(mail, "18:23:31 on 2026-11-22, mail mail Download")

    def test_none(self) -> None:
        self.browser.open(f"/uri/{self.make_directory()}/?t=backups")
        self.assertEqual(self.browser.answer.status, 404)
        self.assertIn("keeps no backups", self.browser.text)


class UploadProgressTests(InterfaceTestCase):
    """What the servers have acknowledged of an upload, while it runs."""

    BATCH = "b" * 16

    def test_an_upload(self) -> None:
        """It rises from nothing, and ends with the upload."""
        seen: list[float] = []
        reports = self.site.uploads

        def look() -> None:
            seen.extend(reports.fractions(self.BATCH).values())
            self.world.clock.callLater(0.01, look)

        self.world.clock.callLater(0.01, look)
        head = f"PUT /uri?progress={self.BATCH}.7 HTTP/1.0\r\nContent-Length: {len(LARGE)}\r\n\r\n"
        self.assertEqual(self.send(head.encode() + LARGE).status, 200)
        self.assertEqual(seen, sorted(seen))
        self.assertEqual(seen[0], 0.0)
        self.assertGreater(len(seen), 2)
        self.assertEqual(len(reports), 0)

    def test_answer(self) -> None:
        with self.site.uploads.watched(f"{self.BATCH}.7") as report:
            assert report is not None
            report(1, 4)
            answer = self.get(f"/uploads/{self.BATCH}")
            self.assertEqual(json.loads(answer.body), {"7": 0.25})
            self.assertEqual(answer.headers["cache-control"], "no-store")
            self.assertEqual(json.loads(self.get("/uploads/other").body), {})
        self.assertEqual(json.loads(self.get(f"/uploads/{self.BATCH}").body), {})
        self.assertEqual(self.get("/uploads/").status, 404)
        self.assertEqual(self.get("/uploads/a/b").status, 404)
        self.assertNotIn(self.BATCH, "".join(self.lines))

    def test_names(self) -> None:
        uploads = UploadProgress()
        for name in ("", "short.1", "b" * 16, f"{'b' * 65}.1", f"{self.BATCH}.x", "../" * 9 + ".1"):
            with self.assertRaises(WebError), uploads.watched(name):
                self.fail(name)

    def test_bound(self) -> None:
        """More uploads than may be watched are stored without being watched."""
        self.patch(transfers_page, "MOST_UPLOADS", 1)
        uploads = UploadProgress()
        with uploads.watched(f"{self.BATCH}.1") as one, uploads.watched(f"{self.BATCH}.2") as two:
            self.assertIsNotNone(one)
            self.assertIsNone(two)
