"""The timeline of transfers in Chromium: to scale, without scripts, in light and dark, and while they run."""

from __future__ import annotations

import random
from io import BytesIO
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.gateway.transfer_records import TransferRecord
from pipegrid.wire.storage_messages import ServerIdentity
from tests.browser import Page, running_browser
from tests.gateway.web_ui.browser_world import DESK, PHONE, BrowserTestCase, reactor

_BARS = """
[...document.querySelectorAll(".bursts svg")].map((row) => {
  const {left, right, top, bottom} = row.getBoundingClientRect();
  const scale = (bar) => {
    const box = bar.getBoundingClientRect();
    return {from: (box.left - left) / (right - left), to: (box.right - left) / (right - left),
            width: box.width, height: box.height, inside: box.top >= top - 1 && box.bottom <= bottom + 1,
            fill: getComputedStyle(bar).fill};
  };
  return [...row.querySelectorAll("rect")].map(scale);
})
"""
_NAMES = "[...document.querySelectorAll('.bursts .server')].map((name) => name.innerText)"
_HOSTILE = "</text><img src=x onerror=document.title='owned'>" + "W" * 300


def server(nickname: str) -> ServerIdentity:
    """Return a server."""
    return ServerIdentity(f"v0-{nickname[:20]}", nickname, b"", b"")


class TimelineTests(BrowserTestCase):
    async def bars(self, page: Page) -> list[list[dict[str, Any]]]:
        """Return the bars of each server as they are drawn: all are visible, and within their row."""
        *rows, axis = await page.evaluate(_BARS)
        self.assertEqual(axis, [])
        for bar in (bar for row in rows for bar in row):
            self.assertTrue(bar["inside"], bar)
            self.assertGreaterEqual(bar["from"], -0.001)
            self.assertLessEqual(bar["to"], 1.001)
            self.assertGreaterEqual(bar["width"], 1)
            self.assertGreaterEqual(bar["height"], 2)
        return rows  # type: ignore[no-any-return]

    async def test_without_scripts(self) -> None:
        """An upload and a download have a row of bars for each server, on phone and desk."""
        cap = await self.put(random.Random(1).randbytes(4_000_000))
        await self.grid.get(cap, BytesIO())
        fills = set()
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.allow_scripts(False)
            await page.listen()
            for place, servers in (("up-1", 10), ("down-2", 3)):
                for width, dark in ((PHONE, True), (DESK, False)):
                    await page.show(f"{self.url}status/{place}", width, 800, dark)
                    rows = await self.bars(page)
                    self.assertGreaterEqual(len(rows), servers)
                    self.assertTrue(all(rows))
                    fills |= {bar["fill"] for row in rows for bar in row}
                    wide = await page.evaluate("document.documentElement.scrollWidth")
                    self.assertLessEqual(wide, width)
                    await page.click("main details:last-of-type summary")
                    self.assertGreater(
                        await page.evaluate("document.querySelectorAll('.scroll tr').length"),
                        servers,
                    )
            self.assertEqual(len(fills), 2, "one colour in light, another in dark")
            self.assertEqual(page.problems, [])
            await self.check_secrets(page)

    async def test_while_it_runs(self) -> None:
        """The page follows; a hostile nickname is text; places are to scale when it has ended."""
        putting: Deferred[object] = Deferred()
        records: list[TransferRecord] = []

        def start(record: TransferRecord) -> Deferred[object]:
            records.append(record)
            return putting

        self.grid.records.follow("upload", start)
        [record] = records
        began_s = record.began_s
        record.note_traffic(server(_HOSTILE), began_s, began_s + 0.001, 5000)
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            await page.show(f"{self.url}status/up-1", PHONE, 800, True)
            await page.evaluate("window.same = true")
            record.note_traffic(server("slow"), began_s + 250, began_s + 750, 1_000_000)
            record.note_traffic(server("slow"), began_s + 800, began_s + 1000, 1_600_000)
            await page.until(f"{_NAMES}.includes('slow')")
            [[_], [first, last]] = await self.bars(page)
            for found, expected in ((first, (0.25, 0.75)), (last, (0.8, 1.0))):
                self.assertAlmostEqual(found["from"], expected[0], delta=0.01)
                self.assertAlmostEqual(found["to"], expected[1], delta=0.01)
            self.assertAlmostEqual(last["height"], 2 * first["height"], delta=1)
            [name, _] = await page.evaluate(_NAMES)
            self.assertTrue(name.startswith("</text><img src=x onerror="))
            self.assertLess(len(name), 200)
            for width, dark in ((PHONE, False), (PHONE, True), (DESK, False), (DESK, True)):
                await page.resize(width, 800, dark)
                await self.check_rules(page)
                wide = await page.evaluate("document.documentElement.scrollWidth")
                self.assertLessEqual(wide, width)
            self.assertFalse(await page.evaluate("!!document.querySelector('main img')"))
            self.assertNotIn("owned", await page.evaluate("document.title"))
            putting.callback(None)
            await page.until("document.querySelector('.badge').innerText == 'finished'")
            self.assertTrue(await page.evaluate("window.same"))
            self.assertEqual(page.problems, [])
