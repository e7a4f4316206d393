"""What is stored while a server is down, and what users are told of it, with real servers."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from misc.speedtest.peers.nodes import free_port

from pipegrid.core.encoding_parameters import Params
from pipegrid.speedtest.child_processes import at_ports, environment, first_line, make_client, reap
from pipegrid.wire import server_address
from tests.cli.processes import ProcessTestCase

STOP_S = 15.0


class SpreadTests(ProcessTestCase):
    """Three servers that any two of three shares are on, each a process; commands as users run them."""

    def setUp(self) -> None:
        super().setUp()
        self.ports = [free_port() for _ in range(3)]
        self.processes: dict[int, subprocess.Popen[str]] = {}
        addresses = [server_address.parse_nurl(self.serve(number)) for number in range(3)]
        self.addCleanup(self.stop_all)
        client = self.home / "client"
        make_client(client, at_ports(addresses, self.ports), Params(2, 3), 1)
        self.grid = "-d", str(client)

    def serve(self, number: int) -> str:
        """Start a server; returns its NURL."""
        lifeline = ["-m", "pipegrid.speedtest.end_with_parent", "pipegrid.cli"]
        where = ["--port", f"tcp:{self.ports[number]}:interface=127.0.0.1"]
        process = subprocess.Popen(
            [sys.executable, *lifeline, "-d", str(self.directory(number)), "serve", *where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        self.processes[number] = process
        return first_line(process)

    def directory(self, number: int) -> Path:
        return self.home / f"server-{number}"

    def stop(self, number: int, how: int = signal.SIGTERM) -> None:
        process = self.processes.pop(number)
        process.send_signal(how)
        reap(process, STOP_S)

    def stop_all(self) -> None:
        for number in list(self.processes):
            self.stop(number)

    def run_here(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        return self.run_command(*self.grid, *arguments, status=status)

    def store(self) -> None:
        """Store a file of each kind, and a tree, in a directory that can change."""
        random_bytes = random.Random(1).randbytes
        self.tree = self.home / "tree"
        (self.tree / "below").mkdir(parents=True)
        for name, size in (
            ("small", 3000),
            ("large", 2_000_000),
            ("tree/a", 700),
            ("tree/below/b", 800),
        ):
            (self.home / name).write_bytes(random_bytes(size))
        for command in (
            ("alias", "create", "home"),
            ("put", "small", "home:immutable"),
            ("put", "--mutable", "small", "home:sdmf"),
            ("put", "--mutable", "--format", "mdmf", "large", "home:mdmf"),
            ("cp", "-r", "tree", "home:"),
            ("backup", "tree"),
        ):
            _, err = self.run_here(*command)
            self.assertEqual(err.count("reached fewer servers than wanted"), 1, (command, err))
            self.assertRegex(err, r"\((at least )?2 of 3\): .*refused")
        _, err = self.run_here("put", "small", "large")
        self.assertEqual(err.count("2 writes reached fewer servers"), 1, err)

    def assert_any_may_die(self) -> None:
        """Kill each server: all of the tree comes back without it."""
        for number in range(3):
            self.stop(number, signal.SIGKILL)
            back = self.home / "back"
            self.run_here("get", "-r", "home:", "-o", str(back))
            for name, original in (("immutable", "small"), ("sdmf", "small"), ("mdmf", "large")):
                self.assertEqual((back / name).read_bytes(), (self.home / original).read_bytes())
            self.assertEqual(
                (back / "tree/below/b").read_bytes(), (self.tree / "below/b").read_bytes()
            )
            shutil.rmtree(back)
            self.serve(number)

    def test_a_server_that_was_down(self) -> None:
        """Each step is told as it is; after the nightly command any server may die; so after a lost disk."""
        self.stop(0)
        self.store()
        out, _ = self.run_here("check", "home:")
        self.assertRegex(
            out, r"^healthy on the reachable servers: .*happiness 2; server \S+ is down$"
        )
        self.serve(0)
        out, _ = self.run_here("check", "-r", "home:", status=1)
        self.assertIn("home: on too few servers: 3 of 3 shares good", out)
        self.assertIn("8 objects: 0 healthy, 8 on too few servers", out)
        out, _ = self.run_here("check", "-r", "--repair", "--add-lease", "home:")
        self.assertIn("8 objects: 0 healthy, 8 repaired", out)
        self.assert_nothing_to_do()
        self.assert_any_may_die()
        self.stop(1)
        shutil.rmtree(self.directory(1) / "storage" / "shares")
        self.serve(1)
        out, _ = self.run_here("check", "-r", "home:", status=1)
        self.assertIn("8 damaged", out)
        self.run_here("repair", "-r", "home:")
        self.assert_nothing_to_do()
        self.assert_any_may_die()

    def assert_nothing_to_do(self) -> None:
        for command in (
            ("check", "-r", "home:"),
            ("check", "-r", "--repair", "--add-lease", "home:"),
            ("repair", "-r", "home:"),
        ):
            self.assertEqual(
                self.run_here(*command)[0], "8 objects: 8 healthy, 24 of 24 shares good", command
            )

    def test_an_outage(self) -> None:
        """One line says which server is down, for a file and for a tree."""
        (self.home / "small").write_bytes(b"s" * 3000)
        self.run_here("alias", "create", "home")
        self.run_here("put", "small", "home:a")
        self.stop(2)
        out, err = self.run_here("check", "home:a", status=1)
        self.assertRegex(out, r"^reachable: 2 of 3 shares; server \S+ is down$")
        self.assertEqual(err, "")
        out, err = self.run_here("check", "-r", "home:", status=1)
        self.assertRegex(
            out, r"^2 objects: 0 healthy, 2 reachable, 4 of 6 shares good; server down: \S+$"
        )
        self.assertEqual(err, "")
        out, _ = self.run_here("-v", "check", "-r", "home:", status=1)
        self.assertIn("home: reachable: 2 of 3 shares", out)
