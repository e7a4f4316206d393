"""Every task of the web interface in a real Chromium: with the mouse, with the keyboard, without scripts."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from pipegrid.core.caps import Cap, LitCap
from tests.browser import Page, running_browser
from tests.gateway.web_ui.browser_world import DESK, PHONE, BrowserTestCase, reactor

LARGE = bytes(range(256)) * 8192
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)


class PagesTestCase(BrowserTestCase):
    """Has a folder to upload."""

    def folder(self) -> str:
        top = Path(self.mktemp()).resolve() / "folder"
        (top / "deep" / "deeper").mkdir(parents=True)
        (top / "empty").mkdir()
        (top / "a #%?.txt").write_bytes(b"a")
        for n in range(8):
            (top / "deep" / f"{n}.bin").write_bytes(b"%d" % n * 100)
        (top / "deep" / "deeper" / "large").write_bytes(LARGE)
        return str(top)


class TaskTests(PagesTestCase):
    """What people do, in three ways."""

    async def show(self, page: Page, cap: Cap) -> None:
        await page.listen()
        await page.show(self.page_of(cap), DESK)

    def local_file(self, name: str, data: bytes) -> str:
        path = Path(self.mktemp()).resolve()
        path.mkdir(parents=True)
        (path / name).write_bytes(data)
        return str(path / name)

    async def test_with_the_mouse(self) -> None:
        """Make a directory, upload, rename, share, download as an archive, check, delete."""
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            await page.show(self.url, DESK)
            await page.loads(page.click("section[aria-labelledby=make] button"))
            await page.until("document.querySelector('#drop')")
            await page.click("#tools details:nth-of-type(2) summary")
            await page.fill("#mkdir-name", "photos <b>")
            await page.loads(page.click("#tools details:nth-of-type(2) button"))
            await page.loads(page.click("tbody th a"))
            await page.choose_files("#drop-files", [self.local_file("a.txt", b"hello" * 100)])
            await page.until("document.querySelector('#listing').innerText.includes('a.txt')")
            await page.until(
                "document.querySelector('#upload-status').innerText.includes('1 file stored')"
            )
            await page.loads(page.click("tbody a[href*=rename-form]"))
            await page.fill("input[name=to_name]", "b.txt")
            await page.loads(page.click("form:has(input[name=to_name]) button"))
            self.assertIn(
                "b.txt", await page.evaluate("document.querySelector('#listing').innerText")
            )
            await page.loads(page.click("tbody a[href*='t=share']"))
            self.assertTrue(await page.evaluate("!!document.querySelector('svg.qr, img.qr, .qr')"))
            await page.call("Page.navigateToHistoryEntry", **await self._back(page))
            await page.until("document.querySelector('#listing')")
            downloads = Path(self.mktemp()).resolve()
            downloads.mkdir()
            await browser.save_downloads(str(downloads))
            await page.click("a[href*='t=archive']")
            saved = await self._downloaded(downloads)
            with zipfile.ZipFile(saved) as found:
                self.assertEqual(found.namelist()[1:], ["photos _b_/b.txt"])
            await page.loads(page.click("a[href*='check-form']"))
            await page.loads(page.click("main button"))
            await page.until(
                "document.querySelector('main').innerText.includes('2 objects of 2 checked')"
            )
            self.assertEqual(page.problems, [])
            await self.check_secrets(page)

    async def _back(self, page: Page) -> dict[str, int]:
        history = await page.call("Page.getNavigationHistory")
        entry = history["entries"][history["currentIndex"] - 1]
        return {"entryId": entry["id"]}

    async def _downloaded(self, directory: Path) -> Path:
        for _ in range(500):
            found = [each for each in directory.iterdir() if each.suffix == ".zip"]
            if found:
                return found[0]
            await deferLater(reactor, 0.02, lambda: None)
        raise AssertionError(f"nothing was saved: {os.listdir(directory)}")

    async def test_with_the_keyboard(self) -> None:
        """The same with Tab, Enter and the space bar alone; each element shows that it has the focus."""
        root = await self.make_directory(**{"a.txt": LitCap(b"hello")})
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await self.show(page, root)
            await page.press("Tab")
            self.assertEqual(await page.evaluate("document.activeElement.className"), "skip")
            await page.press("Enter")
            await page.tab_to("#tools details:nth-of-type(2) summary")
            await page.press("Enter")
            await page.tab_to("#mkdir-name")
            await page.type("new")
            await page.loads(page.press("Enter"))
            await page.tab_to("#choose-files")
            await page.tab_to("#choose-folder")
            await page.tab_to("a[aria-label='Change a.txt']")
            await page.loads(page.press("Enter"))
            await page.tab_to("input[name=to_name]")
            await page.call("Input.dispatchKeyEvent", type="keyDown", commands=["selectAll"])
            await page.type("b.txt")
            await page.loads(page.press("Enter"))
            listed = await page.evaluate("document.querySelector('#listing').innerText")
            self.assertIn("b.txt", listed)
            self.assertIn("new", listed)
            await page.tab_to("a[href*='check-form']")
            await page.loads(page.press("Enter"))
            await page.tab_to("input[name=verify]")
            await page.press("Space")
            self.assertTrue(await page.evaluate("document.activeElement.checked"))
            await page.tab_to("main button")
            await page.loads(page.press("Enter"))
            await page.until("document.querySelector('main').innerText.includes('finished')")
            await page.tab_to("main a[href^='/uri/']")
            await page.loads(page.press("Enter"))
            await page.tab_to("a[aria-label='Change b.txt']")
            await page.loads(page.press("Enter"))
            await page.tab_to("button.danger")
            await page.loads(page.press("Enter"))
            listed = await page.evaluate("document.querySelector('#listing').innerText")
            self.assertNotIn("b.txt", listed)
            self.assertEqual(page.problems, [])
            await self.check_secrets(page)

    async def test_without_scripts(self) -> None:
        """Browse, upload, download and delete by links and forms alone."""
        sub = await self.make_directory(**{"inside.txt": LitCap(b"inside")})
        root = await self.make_directory(sub=sub)
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.allow_scripts(False)
            await self.show(page, root)
            self.assertFalse(await page.evaluate("!!document.querySelector('#drop')"))
            await page.loads(page.click("tbody th a"))
            await page.loads(page.click("tbody th a"))
            self.assertIn("inside", await page.evaluate("document.querySelector('pre').innerText"))
            await page.show(self.page_of(root), PHONE)
            await page.click("#tools details:nth-of-type(1) summary")
            await page.choose_files("#upload-file", [self.local_file("up.txt", LARGE)])
            await page.loads(page.click("#tools details:nth-of-type(1) button"))
            listed = await page.evaluate("document.querySelector('#listing').innerText")
            self.assertIn("up.txt", listed)
            await page.click("#tools details:nth-of-type(1) summary")
            await page.choose_files("#upload-folder", [self.folder()])
            await page.loads(page.click("form:has(#upload-folder) button"))
            self.assertIn(
                "The files were uploaded.",
                await page.evaluate("document.querySelector('main').innerText"),
            )
            found = (await self.grid.directory(root).list())["folder"].cap
            assert found is not None
            target = Path(self.mktemp()).resolve()
            await self.grid.tree.get_tree(found, target)
            self.assertEqual((target / "a #%?.txt").read_bytes(), b"a")
            self.assertEqual((target / "deep" / "deeper" / "large").read_bytes(), LARGE)
            await page.loads(page.click("a[href*='check-form']"))
            await page.loads(page.click("main button"))
            for _ in range(100):
                if "finished" in await page.evaluate("document.querySelector('main').innerText"):
                    break
                await page.loads(page.click("a.button.main"))
            self.assertIn(
                "none damaged", await page.evaluate("document.querySelector('main').innerText")
            )
            await page.show(self.page_of(root), DESK)
            await page.loads(page.click("a[aria-label='Change up.txt']"))
            await page.loads(page.click("button.danger"))
            listed = await page.evaluate("document.querySelector('#listing').innerText")
            self.assertNotIn("up.txt", listed)
            self.assertEqual(page.problems, [])
            await self.check_secrets(page)


class UploadTests(PagesTestCase):
    """Files and folders that are dropped."""

    async def test_a_folder(self) -> None:
        """All of it arrives, with empty folders; progress is in bytes that servers have acknowledged."""
        root = await self.make_directory()
        folder = self.folder()
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            await page.show(self.page_of(root), DESK)
            said = "document.querySelector('#upload-status').innerText"
            await page.evaluate(
                "window.heard = []; new MutationObserver(() => heard.push("
                "document.querySelector('#upload-status').innerText)).observe("
                "document.querySelector('#upload-status'), {childList: true, subtree: true})"
            )
            await page.drop("#drop", [folder])
            await page.until(f"{said}.startsWith('10 files stored')")
            self.assertIn(
                "of 2.1 MB acknowledged by the servers, 10 of 10 files stored",
                await page.evaluate("document.querySelector('#upload-amount').innerText"),
            )
            heard = await page.evaluate("heard")
            self.assertEqual(heard[0], "Uploading 10 files, 2.1 MB.")
            listed = await page.evaluate("document.querySelector('#listing').innerText")
            self.assertIn("folder", listed)
            self.assertFalse(await page.evaluate("document.querySelector('#listing').ariaBusy"))
            self.assertEqual(page.problems, [])
            await self.check_rules(page)
            await self.check_secrets(page)
        found = (await self.grid.directory(root).list())["folder"].cap
        assert found is not None
        target = Path(self.mktemp()).resolve()
        await self.grid.tree.get_tree(found, target)
        self.assertEqual((target / "a #%?.txt").read_bytes(), b"a")
        self.assertEqual((target / "deep" / "deeper" / "large").read_bytes(), LARGE)
        self.assertEqual(sorted(os.listdir(target)), ["a #%?.txt", "deep", "empty"])
        self.assertEqual(len(os.listdir(target / "deep")), 9)

    async def test_names_that_are_taken(self) -> None:
        """They stay what they are, and are named; with the box ticked they are replaced."""
        root = await self.make_directory(**{"a.txt": LitCap(b"old")})
        path = Path(self.mktemp()).resolve()
        path.mkdir()
        (path / "a.txt").write_bytes(b"new")
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            await page.show(self.page_of(root), DESK)
            await page.drop("#drop", [str(path / "a.txt")])
            said = "document.querySelector('#upload-status').innerText"
            await page.until(f"{said}.includes('0 files stored')")
            problems = await page.evaluate("document.querySelector('#upload-problems').innerText")
            self.assertEqual(problems, "a.txt: a file of this name is there already")
            await self.check_rules(page)
            children = await self.grid.directory(root).list()
            self.assertEqual(children["a.txt"].cap, LitCap(b"old"))
            await page.click("#drop-replace")
            await page.drop("#drop", [str(path / "a.txt")])
            await page.until(f"{said}.includes('1 file stored')")
            children = await self.grid.directory(root).list()
            self.assertEqual(children["a.txt"].cap, LitCap(b"new"))

    async def test_cancel(self) -> None:
        """What was not stored yet is named, and nothing of it stays in the gateway."""
        root = await self.make_directory()
        path = Path(self.mktemp()).resolve()
        path.mkdir()
        for n in range(6):
            (path / f"{n}").write_bytes(LARGE)
        self.patch(self.grid, "put", lambda source, **options: Deferred())
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            await page.show(self.page_of(root), DESK)
            await page.drop("#drop", [str(path / f"{n}") for n in range(6)])
            await page.until("document.querySelector('#upload-cancel').getClientRects().length")
            words = await page.evaluate("document.querySelector('#upload-amount').innerText")
            self.assertEqual(
                words, "0 B of 12.6 MB acknowledged by the servers, 0 of 6 files stored"
            )
            await page.until(
                "performance.getEntriesByType('resource').some((e) => e.name.includes('/uploads/'))"
            )
            await page.click("#upload-cancel")
            await page.until(
                "document.querySelector('#upload-status').innerText.includes('6 files not')"
            )
        for _ in range(200):
            if not self.site.space.used_bytes and not len(self.site.uploads):
                break
            await deferLater(reactor, 0.02, lambda: None)
        self.assertEqual((self.site.space.used_bytes, len(self.site.uploads)), (0, 0))
