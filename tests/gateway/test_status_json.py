"""Servers, transfers and statistics of a gateway, as they are recorded and told."""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.errors import DirectoryError, PipegridError
from pipegrid.gateway.server_states import ANSWER_S, FRESH_S, STALE_S, ServerStates
from pipegrid.gateway.transfer_records import KEPT, RecordedGrid, TransferRecords
from pipegrid.gateway.web_api.gateway_metrics import GatewayCollector, metrics_text
from pipegrid.gateway.web_api.operation_handles import OperationHandles
from pipegrid.gateway.web_api.status_requests import (
    events_json,
    find_transfer,
    openmetrics_text,
    statistics_json,
    statistics_page,
    transfers_json,
    welcome_json,
)
from pipegrid.gateway.web_ui.transfers_page import transfer_page, transfers_page
from pipegrid.grid.introducer_client import IntroducerStatus
from pipegrid.testing.clock import HeapClock
from pipegrid.transfer.results import PutResult
from tests.gateway.gateway_world import CHK_DATA, GatewayTestCase


class RecordedTestCase(GatewayTestCase):
    """Has a grid that records."""

    grid: RecordedGrid

    def setUp(self) -> None:
        super().setUp()
        self.grid = RecordedGrid.of(self.grid)
        self.records = self.grid.records

    def counts(self) -> dict[str, int]:
        """Return how many transfers of each kind have finished."""
        return {
            kind: count
            for (kind, state), count in self.records.ended.items()
            if state == "finished"
        }


class RecordedGridTests(RecordedTestCase):
    def test_files(self) -> None:
        """Uploads and downloads, with their bytes and storage index."""
        cap = self.put(CHK_DATA)
        self.assertEqual(self.world.run(self.grid.read(cap)), CHK_DATA)
        self.world.run(self.grid.get(cap, BytesIO(), start=6))
        self.assertEqual(self.counts(), {"upload": 1, "download": 2})
        self.assertEqual(self.records.bytes["upload"], 56)
        self.assertEqual(self.records.bytes["download"], 56 + 50)
        self.assertEqual({record.cap for record in self.records.recent}, {cap})

    def test_many_files(self) -> None:
        outcomes = self.world.run(self.grid.put_many([CHK_DATA, b"lit", CHK_DATA * 2]))
        self.assertFalse([one for one in outcomes if isinstance(one, Failure)])
        self.assertEqual(self.counts(), {"upload": 3})

    def test_directories(self) -> None:
        """To list one is a retrieve, to change it a publish."""
        cap = self.make_directory(file=self.put(CHK_DATA))
        self.world.run(self.grid.directory(cap).list())
        self.assertEqual(self.counts(), {"upload": 1, "publish": 2, "retrieve": 1})

    def test_mutable_files(self) -> None:
        cap = self.world.run(self.grid.create_mutable(b"first")).cap
        self.world.run(self.grid.overwrite(cap, b"second"))
        self.world.run(self.grid.update(cap, 0, b"S"))
        self.assertEqual(self.world.run(self.grid.read(cap)), b"Second")
        self.assertEqual(self.counts(), {"publish": 3, "retrieve": 1})
        self.assertEqual(self.records.bytes["publish"], 5 + 6 + 6)

    def test_running(self) -> None:
        """One that runs is listed, with its progress; a client that goes away cancels it."""
        running = self.grid.put(b"x" * 500_000)
        running.addErrback(lambda failure: failure.trap(CancelledError))
        [said] = transfers_json(self.records)["active"]
        self.assertEqual((said["type"], said["total-size"]), ("upload", 500_000))
        self.assertTrue(said["status"].startswith("Running"))
        self.assertIn("progress-encode-push", said)
        running.cancel()
        self.world.clock.advance(1)
        said = transfers_json(self.records)
        self.assertEqual((said["active"], said["recent"][0]["status"]), ([], "Cancelled"))

    def test_failed(self) -> None:
        """Why is on its page, escaped."""
        cap = self.put(CHK_DATA)
        self.delete_shares(cap)
        with self.assertRaises(PipegridError):
            self.world.run(self.grid.read(cap))
        [record, _] = self.records.recent
        self.assertEqual(record.state, "failed")
        self.assertIn(b"no share of the file", transfer_page(record).data)


class RecordsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = HeapClock()
        self.records = TransferRecords(self.clock, lambda: 1e9 + self.clock.seconds())

    def transfer(self, kind: Any = "upload", took_s: float = 0.0) -> None:
        done: Deferred[int] = Deferred()
        self.records.follow(kind, lambda record: done, _set_size)
        self.clock.advance(took_s)
        done.callback(7)

    def test_recent_ones_are_bounded(self) -> None:
        """The newest of each kind are kept."""
        for kind in KEPT:
            for _ in range(100):
                self.transfer(kind)
        self.assertEqual(len(self.records.recent), sum(KEPT.values()))
        self.assertEqual(self.records.ended["upload", "finished"], 100)
        said = transfers_json(self.records)
        self.assertEqual(len(said["recent"]), sum(KEPT.values()))

    def test_durations(self) -> None:
        """Each is in the class of the least bound that it does not exceed."""
        for took_s in (0.0, 0.02, 2.0, 1000.0):
            self.transfer(took_s=took_s)
        self.assertEqual(
            self.records.durations,
            {("upload", 0): 1, ("upload", 1): 1, ("upload", 5): 1, ("upload", 10): 1},
        )
        self.assertAlmostEqual(self.records.seconds["upload"], 1002.02)

    def test_statistics(self) -> None:
        """Counters of nothing are left out, as Tahoe-LAFS leaves them out."""
        self.transfer("publish")
        said = statistics_json(self.records, 12.5)
        self.assertEqual(
            said["counters"], {"mutable.files_published": 1, "mutable.bytes_published": 7}
        )
        self.assertEqual(said["stats"]["node.uptime"], 12.5)
        text = openmetrics_text(said)
        self.assertRegex(text, r"\A(tahoe_[a-z]+_[^ ]+ [^\n]+\n)+# EOF\n\Z")
        self.assertIn("tahoe_counters_mutable_bytes_published 7\n", text)
        self.assertIn(b"<html", statistics_page(said).data)

    def test_pages(self) -> None:
        """Each transfer has one, by its kind and number."""
        self.transfer("download")
        found = find_transfer(self.records, "down-1")
        assert found is not None
        self.assertIn(b"Download 1", transfer_page(found).data)
        self.assertIn(b"/status/down-1", transfers_page(self.records).data)
        self.assertIn('"ended": 1000000000.0', events_json(found))
        for name in ("up-1", "down-2", "down-x", "../down-1", "down-1\n"):
            self.assertIsNone(find_transfer(self.records, name))

    def test_error_has_no_page_of_its_own(self) -> None:
        failing: Deferred[int] = Deferred()
        self.records.follow("upload", lambda record: failing).addErrback(lambda _: None)
        failing.errback(DirectoryError("<b>"))
        self.assertIn(b"&lt;b&gt;", transfer_page(self.records.recent[0]).data)


def _set_size(record: Any, size: int) -> None:
    record.size = size


class ServerStatesTests(RecordedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.states = ServerStates(self.grid, self.world.client.clock, lambda: 1e9)
        self.addCleanup(self.states.close)

    def current(self) -> Any:
        began_s = self.world.clock.seconds()
        states = self.run_now(self.states.current())
        self.took_s = self.world.clock.seconds() - began_s
        return states

    def said(self) -> Any:
        return welcome_json(self.current(), [])["servers"]

    def test_all_connected(self) -> None:
        """All that clients wait for is there at the first answer."""
        servers = self.said()
        self.assertEqual(len(servers), 10)
        for server in servers:
            self.assertTrue(server["connection_status"].startswith("Connected via https"))
            self.assertEqual(server["last_received_data"], 1e9)
            self.assertIsInstance(server["available_space"], int)
            self.assertTrue(server["version"])
        self.assertLess(self.took_s, ANSWER_S)

    def test_one_does_not_answer(self) -> None:
        """It delays the first answer by a moment, and no other; then it is known to be out of reach."""
        self.world.network.partition("s3")
        states = self.current()
        self.assertEqual(self.took_s, ANSWER_S)
        self.assertEqual([s.connection_text for s in states].count("Trying to connect"), 1)
        self.current()
        self.assertEqual(self.took_s, 0)
        self.world.clock.advance(FRESH_S + 2)
        self.assertRegex(self.said()[3]["connection_status"], "^Not reachable: ")

    def test_asked_no_more_often_than_needed(self) -> None:
        """What is fresh is answered at once; what is old, after servers have answered again."""
        calls: list[int] = []
        ask = self.grid.ask_servers

        def counted(told: Any) -> Any:
            calls.append(1)
            return ask(told)

        self.patch(self.grid, "ask_servers", counted)
        self.current()
        for _ in range(5):
            self.current()
            self.assertEqual(self.took_s, 0)
        self.assertEqual(len(calls), 1)
        self.world.clock.advance(FRESH_S)
        self.current()
        self.assertEqual((len(calls), self.took_s), (2, 0))
        self.world.clock.advance(STALE_S)
        self.world.servers[0].host.crash()
        self.assertFalse(self.current()[0].is_connected)
        self.assertEqual(len(calls), 3)

    def test_introducers(self) -> None:
        """Their texts begin with the same word as those of servers."""
        introducers = [
            IntroducerStatus("a", "host:1", True, None, 3),
            IntroducerStatus("b", "host:2", False, "refused", 0),
        ]
        said = welcome_json([], introducers)["introducers"]["statuses"]
        self.assertEqual(said, ["Connected to host:1", "Not reachable: refused"])


class MetricsTests(RecordedTestCase):
    def page(self, states: ServerStates) -> str:
        handles = OperationHandles(self.grid, self.world.client.clock)
        collector = GatewayCollector(
            self.records, handles, states.latest, lambda: {200: 5, 404: 1}, lambda: 2
        )
        return metrics_text(collector).decode()

    def test_page(self) -> None:
        states = ServerStates(self.grid, self.world.client.clock, lambda: 1e9)
        self.addCleanup(states.close)
        cap = self.put(CHK_DATA)
        self.run_now(states.current())
        text = self.page(states)
        for line in (
            'pipegrid_gateway_transfers_total{kind="upload",state="finished"} 1.0',
            'pipegrid_gateway_transferred_bytes_total{kind="upload"} 56.0',
            'pipegrid_gateway_transfer_seconds_count{kind="upload"} 1.0',
            'pipegrid_gateway_servers{state="connected"} 10.0',
            'pipegrid_gateway_responses_total{status="404"} 1.0',
            "pipegrid_gateway_connections 2.0",
            "pipegrid_gateway_operations 0.0",
        ):
            self.assertIn(line + "\n", text)
        self.assertIn('pipegrid_gateway_server_latency_seconds{server="s3"} 0.0', text)
        assert isinstance(cap, ChkCap)
        self.assertNotIn("URI:", text)

    def test_bounded(self) -> None:
        """As many lines after a thousand transfers as after one."""
        states = ServerStates(self.grid, self.world.client.clock, lambda: 1e9)
        lines = len(self.page(states).splitlines())
        for _ in range(1000):
            self.records.note_ended("upload", Failure(DirectoryError("x")), _never)
        self.assertEqual(len(self.page(states).splitlines()), lines)
        self.assertFalse(re.search(r'server="', self.page(states)))


def _never(record: Any, result: PutResult) -> None:
    raise AssertionError
