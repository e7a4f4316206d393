"""Every page in Chromium, on phone and desk, in light and dark: axe-core's rules, and whether it all fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred

from pipegrid.core.caps import LitCap
from pipegrid.core.mutable.directory_content_edits import Link
from tests.browser import Page, running_browser
from tests.gateway.web_ui.browser_world import DESK, PHONE, BrowserTestCase, reactor

SCREENSHOTS = os.environ.get("PIPEGRID_SCREENSHOTS")
"""A directory in which a picture of each page is kept, for people to look at."""

SETTINGS = ((PHONE, True), (DESK, False))
LONG = "a name that is quite long " * 8 + ".txt"


class RulesTests(BrowserTestCase):
    async def stored(self) -> dict[str, str]:
        """Store something for every page; returns the path of each by its name."""
        text = await self.put(b"Some lines of text.\n" * 40)
        damaged = await self.put(b"This file has lost some of its shares." * 40)
        sub = await self.make_directory(**{"damaged.bin": damaged, "inside.txt": text})
        run = "2026-11-22_18:23:31Z"
        archives = await self.make_directory(**{run: sub, run.replace("22_", "23_"): sub})
        children = {"photos": sub, "notes.txt": text, LONG: LitCap(b"x"), "Archives": archives}
        root = await self.make_directory(**children, Latest=sub)
        said = {"files": 1234, "bytes": 5_678_901, "left_out": 2}
        catalogue = await self.make_directory()
        links = [
            Link(f"{name} {run}", sub, metadata={"pipegrid": {"backup": said}})
            for name in ("home", "mail")
        ]
        await self.grid.directory(catalogue).change(links)
        await self.grid.read(damaged)
        self.delete_shares(damaged, keep=4)
        base = f"uri/{root}"
        return {
            "overview": "",
            "directory": f"{base}/",
            "read-only": f"uri/{root.readonly()}/",
            "empty": f"uri/{await self.make_directory()}/",
            "entry": f"{base}/?t=rename-form&name=notes.txt",
            "file": f"{base}/notes.txt?t=info",
            "about": f"{base}/?t=info",
            "share": f"uri/{root.readonly()}?t=share",
            "backups": f"{base}/?t=backups",
            "catalogue": f"uri/{catalogue}/?t=backups",
            "check": f"{base}/?t=check-form",
            "check-file": f"{base}/notes.txt?t=check-form",
            "transfers": "status",
            "transfer": "status/up-1",
            "statistics": "statistics",
            "error": f"{base}/missing",
        }

    async def test_all_pages(self) -> None:
        """No rule is broken, nothing sticks out, and nothing complains."""
        places = await self.stored()
        self.broken: list[tuple[object, ...]] = []
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            for name, place in places.items():
                await page.show(self.url + place, DESK)
                await self.look(page, name)
            await page.show(f"{self.url}{places['check']}")
            await page.loads(page.click("main button"))
            await page.until("document.querySelector('main').innerText.includes('finished')")
            await self.look(page, "checked")
            await page.show(
                f"{self.url}{places['directory'].removesuffix('/')}/photos/damaged.bin?t=check-form"
            )
            await page.loads(page.click("main button"))
            await self.look(page, "damaged")
            self.assertFalse(self.broken, "\n".join(map(str, self.broken)))
            problems = [each for each in page.problems if "404" not in each]
            self.assertEqual(problems, [])
            await self.check_secrets(page)

    async def look(self, page: Page, name: str) -> None:
        """Check what is shown in each of the settings."""
        for width, dark in SETTINGS:
            await page.resize(width, 800, dark)
            wide = await page.evaluate("document.documentElement.scrollWidth")
            self.broken += [(name, width, dark, *each) for each in await self.broken_rules(page)]
            if wide > width:
                self.broken.append((name, width, dark, f"it is {wide} pixels wide"))
            if SCREENSHOTS:
                picture = await page.screenshot()
                shade = "dark" if dark else "light"
                picture.save(Path(SCREENSHOTS) / f"{name}-{width}-{shade}.png")

    async def test_while_it_runs(self) -> None:
        """Pages of what runs follow it without being loaded again; what has the focus keeps it."""
        root = await self.make_directory(**{"a.txt": await self.put(b"a" * 100)})
        waiting: Deferred[None] = Deferred()
        check_many = self.grid.check_many

        def check_later(*args: Any, **options: Any) -> Deferred[Any]:
            async def check() -> Any:
                await waiting
                return await check_many(*args, **options)

            return ensureDeferred(check())

        self.patch(self.grid, "check_many", check_later)
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            await page.show(f"{self.page_of(root)}?t=check-form", DESK)
            await page.loads(page.click("main button"))
            await page.evaluate(
                "window.same = true; document.querySelector('main a[href^=\"/uri/\"]').focus()"
            )
            await self.check_rules(page)
            waiting.callback(None)
            await page.until("document.querySelector('main').innerText.includes('finished')")
            self.assertTrue(await page.evaluate("window.same"))
            self.assertEqual(page.problems, [])

    async def test_live_overview(self) -> None:
        """A transfer that begins, and a server that is lost, are shown by themselves."""
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            await page.show(self.url, DESK)
            await page.fill("#open-cap", "half a cap")
            putting: Deferred[object] = Deferred()
            self.grid.records.follow("upload", lambda record: putting)
            await page.until("document.querySelector('#running').innerText == '1'")
            self.assertEqual(await page.evaluate("document.activeElement.value"), "half a cap")
            putting.callback(None)
            await page.until("document.querySelector('#running').innerText == '0'")
            self.assertEqual(page.problems, [])
