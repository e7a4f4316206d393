"""The timeline of a transfer: what is drawn, what the page says, and what a hostile nickname does to it."""

from __future__ import annotations

import random
from io import BytesIO
from itertools import pairwise

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.gateway.transfer_records import (
    MAX_BURSTS,
    MAX_SAMPLES,
    OTHERS,
    ServerTraffic,
    TrafficBurst,
    TransferRecord,
)
from pipegrid.gateway.web_ui.transfer_timeline import (
    LEAST_BAR_PX,
    LEAST_WIDTH,
    MOST_LISTED,
    ROW_PX,
    progress_curve,
    server_timeline,
    ticks,
)
from pipegrid.gateway.web_ui.transfers_page import transfer_page
from pipegrid.wire.storage_messages import ServerIdentity
from tests.gateway.web_ui.interface_world import InterfaceTestCase
from tests.gateway.web_ui.page_browser import page_faults, parse_page

LARGE = bytes(range(256)) * 2048
HOSTILE = '</text><script>alert(1)</script>" onload="x\u202e\n' + "W" * 300


def traffic_of(nickname: str, *bursts: tuple[float, float, int]) -> ServerTraffic:
    """Return the traffic of a server."""
    return ServerTraffic(f"v0-{nickname}", nickname, [TrafficBurst(*each) for each in bursts])


class TransferPageTests(InterfaceTestCase):
    """The list, and one transfer with its timeline."""

    def test_an_upload(self) -> None:
        self.put(LARGE)
        self.browser.open("/status")
        self.check_page()
        self.browser.follow("Upload 1")
        self.check_page()
        self.assertIn("Acknowledged by the servers by when: 524 kB in", self.browser.text)
        self.assertIn("share 9", self.browser.text)
        [curve] = self.browser.page.all("path", class_="curve")
        self.assertRegex(curve.attributes["d"], r"\AM76.0 224(?:H[\d.]+V[\d.]+)+\Z")

    def test_one_that_failed(self) -> None:
        cap = self.put(LARGE)
        self.delete_shares(cap, keep=1)
        running = self.grid.read(cap)
        running.addErrback(lambda _: None)
        self.world.run(running)
        self.browser.open("/status").follow("Download 2")
        self.check_page()
        self.assertIn("failed", self.browser.text)
        self.assertIn("1 good share", self.browser.text)

    def test_servers_of_an_upload(self) -> None:
        """A row for each server, with bars on one axis; the table has the same bytes."""
        self.put(LARGE)
        self.browser.open("/status/up-1")
        self.check_page()
        picture = self.browser.page.one("div", class_="bursts")
        names = [node.text for node in picture.all("span", class_="server")]
        self.assertEqual(sorted(names), [f"s{number}" for number in range(10)])
        rows = list(picture.all("svg"))
        for row in rows[:-1]:
            self.assertGreaterEqual(len(list(row.all("rect"))), 1)
        self.assertEqual(next(rows[-1].all("text")).text, "0 ms")
        self.assertIn("1.75 MB of shares, 10 servers", self.browser.text)
        self.assertEqual(picture.attributes["aria-labelledby"], "bursts-words")
        table = self.browser.page.one("div", aria_label="Table of what passed when")
        self.assertEqual([node.text for node in table.all("th", scope="rowgroup")], names)
        for group in table.all("tbody"):
            self.assertGreaterEqual(len(list(group.all("tr"))), 2)
        self.assertNotIn(b"style=", self.browser.answer.body)
        self.assertNotIn(b"URI:", self.browser.answer.body)

    def test_servers_of_a_download(self) -> None:
        """Of a large file, of a small one, and of a range that is read into memory."""
        large, small = self.put(LARGE), self.put(LARGE[:1000])
        self.world.run(self.grid.get(large, BytesIO()))
        self.world.run(self.grid.get(small, BytesIO()))
        self.world.run(self.grid.read(large, 7, 1000))
        for number, least in ((3, len(LARGE)), (4, 1000), (5, 1000)):
            record = self.grid.records.find("download", number)
            assert record is not None
            passed = sum(server.size_bytes for server in record.traffic.servers)
            self.assertGreaterEqual(passed, least)
            self.assertLess(passed, 2 * len(LARGE))
            self.browser.open(f"/status/down-{number}")
            self.check_page()
            self.assertIn("Received from each server", self.browser.text)

    def test_while_it_runs(self) -> None:
        """What has passed so far is there, on an axis that ends now."""
        putting = self.grid.put(random.Random(1).randbytes(3 << 20))
        found = self.grid.records.find("upload", 1)
        assert found is not None
        for _ in range(1000):
            if found.traffic.servers:
                break
            self.world.clock.advance(0.001)
        self.assertEqual(found.state, "running")
        page = parse_page(transfer_page(found).data.decode("ascii"))
        self.assertEqual(page_faults(page), [])
        self.assertIn("Sent to each server", page.one("main").text)
        self.world.run(putting)

    def test_nothing_passes(self) -> None:
        """The axis of a transfer that waits goes on, and stands still after its end."""
        clock = Clock()
        record = TransferRecord(1, "upload", 0.0, clock=clock)
        record.note_traffic(ServerIdentity("v0-x", "x", b"", b""), 0.0, 0.5, 1000)
        for now_s, took_s, shown in (
            (10, None, "10.00 s"),
            (20, None, "20.00 s"),
            (30, 25, "25.00 s"),
        ):
            clock.rightNow, record.took_s = now_s, took_s
            self.assertIn(f"1 server, {shown}", transfer_page(record).data.decode("ascii"))

    def test_a_mutable_file_has_none(self) -> None:
        """So there is no empty picture."""
        self.world.run(self.grid.create_mutable(b"first"))
        self.browser.open("/status/publish-1")
        self.check_page()
        self.assertNotIn("each server", self.browser.text)

    def test_a_hostile_nickname(self) -> None:
        """It is text on one line, and shortened; the page stays what it is."""
        record = TransferRecord(1, "upload", 0.0, size=1000, took_s=1.0, state="finished")
        record.note_traffic(ServerIdentity("v0-x", HOSTILE, b"", b""), 0.1, 0.5, 1000)
        answer = transfer_page(record)
        text = answer.data.decode("ascii")
        self.assertNotIn("<script>alert", text)
        page = parse_page(text)
        self.assertEqual(page_faults(page), [])
        self.assertFalse([node for node in page.all() if "onload" in node.attributes])
        [name] = page.one("div", class_="bursts").all("span", class_="server")
        self.assertTrue(name.text.startswith("</text><script>alert(1)</script>"))
        self.assertIn("\\u202e\\n", name.text)
        self.assertLess(len(name.text), 200)

    def test_samples_are_bounded(self) -> None:
        """However often progress is reported, a bounded number is kept, from begin to end."""
        clock = Clock()
        record = TransferRecord(1, "upload", 0.0, clock=clock, size=1000)
        for done in range(100_001):
            clock.rightNow = done / 1000
            record.progress(done, 100_000)
        self.assertLessEqual(len(record.samples), MAX_SAMPLES)
        self.assertGreater(len(record.samples), MAX_SAMPLES / 4)
        self.assertEqual(record.samples[-1], (100.0, 1.0))
        times = [at_s for at_s, _ in record.samples]
        self.assertEqual(times, sorted(times))
        self.assertLess(max(b - a for a, b in pairwise(times)), 3)
        drawn = progress_curve(record.samples, 1000)
        assert drawn is not None
        self.assertIn("in 100.00 s, the first half of it in 50", drawn.words)
        self.assertLessEqual(len(drawn.rows), 10)

    def test_ticks(self) -> None:
        """They are round, and few."""
        self.assertEqual(ticks(100, 5), [0, 20, 40, 60, 80, 100])
        self.assertEqual(ticks(7, 4), [0, 2, 4, 6])
        self.assertEqual(ticks(0.0013, 5), [0, 0.0005, 0.001])
        self.assertLessEqual(len(ticks(3**40, 5)), 6)


class ServerTimelineTests(SynchronousTestCase):
    """The places of bars."""

    def test_places(self) -> None:
        """Of begin and end in percent; the highest bar has the most bytes a second."""
        drawn = server_timeline(
            [traffic_of("a", (0.0, 1.0, 4000), (2.0, 3.0, 1000)), traffic_of("b", (1.0, 3.0, 2))],
            4.0,
        )
        assert drawn is not None
        [fast, slow], [few] = (row.bars for row in drawn.servers)
        self.assertEqual((fast.left, fast.width, fast.top, fast.height), (0, 25, 2, ROW_PX - 2))
        self.assertEqual((slow.left, slow.width, slow.height), (50, 25, (ROW_PX - 2) / 2))
        self.assertEqual((few.left, few.width, few.height), (25, 50, LEAST_BAR_PX))
        self.assertEqual([tick.text for tick in drawn.across], ["0 s", "1 s", "2 s", "3 s", "4 s"])
        self.assertEqual([tick.at for tick in drawn.across], [0, 25, 50, 75, 100])
        self.assertEqual(drawn.words, "5 kB of shares, 2 servers, 4.00 s")
        self.assertEqual(drawn.servers[0].rows[1], ("2.000", "3.000", "1 kB"))

    def test_moments(self) -> None:
        """What passed at one moment is visible, at the end as well, and those close together are one."""
        drawn = server_timeline([traffic_of("a", (1, 1, 5), (1.001, 1.001, 5), (2, 2, 5))], 2.0)
        assert drawn is not None
        [first, last] = drawn.servers[0].bars
        self.assertEqual((first.left, first.width), (50, 100 * LEAST_WIDTH))
        self.assertEqual(last.left + last.width, 100)

    def test_nothing(self) -> None:
        self.assertIsNone(server_timeline([], 1.0))
        self.assertIsNone(server_timeline([traffic_of("a", (0, 0, 5))], 0.0))

    def test_alike(self) -> None:
        """Servers with the same nickname differ by their ids."""
        servers = [
            ServerTraffic(server_id, "disk", [TrafficBurst(0, 1, 1)])
            for server_id in ("v0-abcdefghijkl", "v0-mnopqrstuvwx")
        ]
        others = ServerTraffic("", OTHERS, [TrafficBurst(0, 1, 1)])
        drawn = server_timeline([*servers, traffic_of(OTHERS, (0, 1, 1)), others], 1.0)
        assert drawn is not None
        names = [row.name for row in drawn.servers]
        self.assertEqual(names[:2], ["disk (v0-abcdefghi)", "disk (v0-mnopqrstu)"])
        self.assertEqual(names[2:], ["other servers (v0-other ser)", OTHERS])

    def test_it_is_bounded(self) -> None:
        """However many bursts are kept, the picture and the table are small, and the bytes add up."""
        servers = [
            traffic_of(f"s{number}", *((n / 10, n / 10 + 0.05, 1000) for n in range(MAX_BURSTS)))
            for number in range(10)
        ]
        drawn = server_timeline(servers, 60.0)
        assert drawn is not None
        self.assertLessEqual(sum(len(row.rows) for row in drawn.servers), MOST_LISTED)
        for row in drawn.servers:
            self.assertLessEqual(len(row.bars), 2 / LEAST_WIDTH)
            self.assertEqual(row.size, "600 kB")
