"""
The ``tahoe`` command on a PipeGrid gateway does and says what it does and says on Tahoe-LAFS's own.

Both gateways use the same three servers; ``tahoe`` finds either by ``node.url``.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.interop import processes
from tests.interop.processes import (
    PATIENCE_S,
    TAHOE,
    Gateway,
    start_gateway,
    start_pipegrid_gateway,
    start_pipegrid_server,
    storage_directory,
)

SHARES = (2, 3, 3)  # needed, happy, total
CHK_DATA = b"x" * 1000


class TahoeCommandTestCase(SynchronousTestCase):
    """Three servers, and both gateways."""

    def setUp(self) -> None:
        self.patch(processes, "PATIENCE_S", 300.0)
        root = Path(self.mktemp()).absolute()
        root.mkdir(parents=True)
        self.servers = []
        furls = {}
        for number in range(3):
            server, furl = start_pipegrid_server(root / f"server{number}")
            self.addCleanup(server.stop)
            self.servers.append(server)
            furls[f"server{number}"] = furl
        self.own = start_gateway(root / "tahoe", furls, SHARES)
        self.addCleanup(self.own.stop)
        self.ours = start_pipegrid_gateway(root / "pipegrid", furls, SHARES)
        self.addCleanup(self.ours.stop)

    def tahoe(self, gateway: Gateway, *arguments: str) -> tuple[int, str, str]:
        """Run a command of ``tahoe``; returns its status and what it printed."""
        done = subprocess.run(
            [TAHOE, "-d", str(gateway.directory), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def both(self, *arguments: str) -> tuple[int, str, str]:
        """Run it on both; returns what both said, which is the same."""
        expected = self.tahoe(self.own, *arguments)
        self.assertEqual(_as_sets(self.tahoe(self.ours, *arguments)), _as_sets(expected))
        self.assertNotIn("Traceback", expected[2])
        return expected

    def make_tree(self) -> str:
        """Store a tree by the other gateway; returns its root's cap."""
        root = self.own.request("POST", "uri?t=mkdir", b"").decode()
        self.own.request("PUT", f"uri/{root}/chk", CHK_DATA)
        self.own.request("PUT", f"uri/{root}/lit", b"small")
        self.own.request("PUT", f"uri/{root}/sub/mutable?format=SDMF", b"mutable")
        self.own.request("PUT", f"uri/{root}/sub/f%C3%BCnf", CHK_DATA * 2)
        return root

    def delete_shares(self, info: dict[str, Any], *numbers: int) -> None:
        """Delete these shares of an object on all servers, given its JSON."""
        index = info["verify_uri"].split(":")[2]
        for server in self.servers:
            for number in numbers:
                for share in storage_directory(server).rglob(f"{index}/{number}"):
                    share.unlink()

    def info(self, path: str) -> dict[str, Any]:
        """Return what the other gateway says of an object."""
        found: dict[str, Any] = json.loads(self.own.request("GET", f"uri/{path}?t=json"))[1]
        return found


class TahoeDifferenceTests(TahoeCommandTestCase):
    """Results that are better than on the other gateway, and those that it has not."""

    def test_differences(self) -> None:
        """Where Tahoe-LAFS's gateway stops or crashes, this one goes on."""
        self.check_literal_repair()
        self.check_dead_directory()
        self.check_status()

    def check_literal_repair(self) -> None:
        """``tahoe check --repair`` crashes on its own gateway, and says something here."""
        status, out, _ = self.tahoe(self.ours, "check", "--repair", "URI:LIT:nbswy3dp")
        self.assertEqual((status, out.splitlines()[0]), (0, "Summary: healthy"))

    def check_dead_directory(self) -> None:
        """Both end with an error, and status 1; here all that can be read is listed before."""
        root = self.make_tree()
        sub = self.info(f"{root}/sub")
        self.own.request("PUT", f"uri/{root}/z/last", b"z" * 100)
        self.delete_shares(sub, 0, 1, 2)
        for command in (("manifest",), ("deep-check", "-v")):
            for gateway in (self.own, self.ours):
                status, out, err = self.tahoe(gateway, *command, root)
                self.assertEqual(status, 1)
                self.assertIn("ERROR: UnrecoverableFileError", err)
            self.assertIn("z/last", out)

    def check_status(self) -> None:
        """It finds the token and all figures, and lists what was transferred."""
        cap = self.ours.put(CHK_DATA)
        self.ours.get(cap)
        status, out, err = self.tahoe(self.ours, "status")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("uploaded 1000 B in 1 files", out)
        self.assertIn("downloaded 1000 B in 1 files", out)
        self.assertIn("Finished", out)
        self.assertEqual(self.tahoe(self.ours, "status", "--verbose")[0], 0)


def _as_sets(said: tuple[int, str, str]) -> tuple[int, Any, str]:
    """Return what was said without the order of lines, times, and names of servers."""
    status, out, err = said
    out = re.sub(r"v0-[a-z0-9]{52}", "SERVER", out)
    out = re.sub(r" in [0-9.:]+ *s?", "", out)
    lines = [_sorted_json(line) for line in out.splitlines()]
    return status, sorted(lines), err


def _sorted_json(line: str) -> str:
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except ValueError:
        return line
