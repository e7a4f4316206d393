"""``pipegrid init`` for grids that are there: introducers, files of servers, Tahoe-LAFS nodes."""

from __future__ import annotations

import json
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid.config import load
from tests.cli.support import Run
from tests.grid.introducer_support import FURL, nurl
from tests.grid.test_tahoe_directory import make_node


class InitTests(SynchronousTestCase):
    """Options in, a directory out."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def init(self, *arguments: str, status: int = 0) -> Run:
        """Run the command."""
        run = Run("-d", str(self.directory), "--json", "init", *arguments)
        self.assertEqual(self.successResultOf(run.finished), status, run.stderr)
        return run

    def test_introducers(self) -> None:
        """One is called default; several are numbered."""
        (made,) = self.init("--introducer", str(FURL), "-k", "1", "-n", "2", "--happy", "1").objects
        self.assertEqual((made["servers"], made["introducers"], made["happy"]), (0, 1, 1))
        config = load(self.directory)
        self.assertEqual([each.name for each in config.introducers.addresses], ["default"])
        self.assertIsNone(config.local)
        self.directory = Path(self.mktemp())
        self.init("--introducer", str(FURL), "--introducer", str(FURL))
        self.assertEqual(len(load(self.directory).introducers.addresses), 2)

    def test_a_file_of_servers(self) -> None:
        """It becomes private/servers.yaml; bad entries are told."""
        path = Path(self.mktemp())
        good = {"ann": {"anonymous-storage-NURLs": [nurl(1)]}}
        path.write_text(json.dumps({"storage": {"a": good, "b": {}}}))
        run = self.init("--servers", str(path))
        self.assertEqual(run.objects[0]["servers"], 1)
        self.assertIn("server 'b' is skipped", run.stderr)
        self.assertEqual((self.directory / "private/servers.yaml").read_text(), path.read_text())

    def test_a_number_of_servers(self) -> None:
        """A local grid, as ever."""
        (made,) = self.init("--servers", "4", "-n", "4", "--happy", "2").objects
        self.assertEqual(made["servers"], 4)

    def test_a_tahoe_node(self) -> None:
        """Its numbers are the defaults; options change them."""
        node = Path(self.mktemp())
        make_node(node)
        (made,) = self.init("--tahoe", str(node)).objects
        self.assertEqual((made["required_shares"], made["total_shares"], made["happy"]), (2, 3, 2))
        self.directory = Path(self.mktemp())
        (made,) = self.init("--tahoe", str(node), "-n", "9").objects
        self.assertEqual((made["required_shares"], made["total_shares"]), (2, 9))

    def test_servers_that_were_meant(self) -> None:
        """Servers that cannot be used are no reason to make a local grid instead; ``--local`` is."""
        (self.directory / "private").mkdir(parents=True)
        entry = '{v0-x: {ann: {anonymous-storage-NURLs: ["nonsense"]}}}'
        (self.directory / "private" / "servers.yaml").write_text(f"storage: {entry}")
        run = Run("-d", str(self.directory), "init")
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertIn("say --local", run.stderr)
        self.assertFalse((self.directory / "storage").exists())
        self.init("--local")

    def test_refusals(self) -> None:
        """One sentence, status 2, and nothing is made."""
        empty, broken = Path(self.mktemp()), Path(self.mktemp())
        empty.write_text("storage: {}")
        broken.write_text("storage: [")
        for arguments, words in (
            (["--introducer", nurl(1)], "--introducer: that is a storage server's NURL"),
            (["--introducer", "x"], "--introducer: a fURL looks like"),
            (["--servers", "nowhere"], "nowhere does not exist"),
            (["--servers", str(empty)], "names no servers"),
            (["--servers", str(broken)], "mend it by hand"),
            (["--servers", "300"], "1 to 256"),
            (["--servers", "0"], "1 to 256"),
            (["--tahoe", "nowhere"], "it has no tahoe.cfg"),
            (["--local", "--introducer", str(FURL)], "choose one of"),
            (["--local", "--servers", str(empty)], "choose"),
        ):
            run = self.init(*arguments, status=2)
            self.assertIn(words, run.stderr)
            self.assertFalse(self.directory.exists(), arguments)
