"""The speed tests with ten real servers run, compare what comes back, and report what they promise."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

from misc.speedtest import grid, processes, server_memory, tlsrate
from twisted.trial.unittest import SynchronousTestCase


def lines(main: Any, *arguments: str) -> list[dict[str, Any]]:
    """Run a tool; return the objects that it printed."""
    out = io.StringIO()
    with redirect_stdout(out):
        main(list(arguments))
    return [json.loads(line) for line in out.getvalue().splitlines()]


class GridTests(SynchronousTestCase):
    """``misc/speedtest/grid.py``."""

    def test_tiny(self) -> None:
        """Every scenario gives a line for each direction; no figure is judged."""
        done = processes.run_module("misc.speedtest.grid", "--tiny", "--durability", "none")
        results = [json.loads(line) for line in done.splitlines()]
        names = [
            f"{way} {each.name}" for each in (*grid.SMALL, grid.TINY) for way in ("put", "get")
        ]
        self.assertEqual([result["scenario"] for result in results], names)
        for result in results:
            low, high = result["spread"]
            self.assertTrue(0 < low <= result["median"] <= high, result)
            self.assertGreater(result["client_cpu_s"], 0)
        self.assertGreaterEqual(results[0]["rtt_ms"], 4.0)


class OthersTests(SynchronousTestCase):
    """``misc/speedtest/tlsrate.py`` and ``server_memory.py``."""

    def test_tls_rate(self) -> None:
        """Both directions move all bytes."""
        results = lines(tlsrate.main, "--streams", "2", "--megabytes", "1", "--rounds", "1")
        self.assertEqual([each["scenario"] for each in results], ["TLS, write", "TLS, read"])
        for result in results:
            self.assertGreater(result["median"], 0)

    def test_server_memory(self) -> None:
        """Both ways of writing are measured."""
        results = lines(server_memory.main, "--uploads", "3", "--megabytes", "1.5")
        self.assertEqual([each["body_bytes"] for each in results], [1 << 20, 1_500_000])
        for result in results:
            self.assertTrue(10 < result["before"] <= result["connected"] <= result["peak"])


class ProcessesTests(SynchronousTestCase):
    """``misc/speedtest/processes.py``."""

    def test_nothing_is_left(self) -> None:
        """Servers and directories go, also when what they were for fails."""

        def fail() -> None:
            with processes.Servers(1, durability="none") as servers:
                started.append(servers)
                raise KeyboardInterrupt

        started: list[processes.Servers] = []
        self.assertRaises(KeyboardInterrupt, fail)
        [servers] = started
        self.assertIsNotNone(servers.processes[0].poll())
        self.assertFalse(servers.client.exists())

    def test_a_server_that_cannot_start(self) -> None:
        """It is an error that names the command, not a test that waits."""
        with processes.running(["false"]) as process:
            error = self.assertRaises(RuntimeError, processes.first_line, process)
        self.assertIn("false", str(error))
