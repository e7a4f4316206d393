"""``pipegrid init`` for grids that are there: introducers, files of servers, Tahoe-LAFS nodes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid import creation
from pipegrid.grid.config import load
from pipegrid.grid.creation import suggested
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

    def test_a_tahoe_node_with_aliases(self) -> None:
        """They come along, as they stand there, and so does the nickname."""
        node = Path(self.mktemp())
        make_node(node)
        aliases = node / "private/aliases"
        aliases.write_text("# mine\nhome: URI:DIR2:abc:def\n")
        self.init("--tahoe", str(node))
        copied = self.directory / "private/aliases"
        self.assertEqual(copied.read_text(), aliases.read_text())
        self.assertEqual(copied.stat().st_mode & 0o777, 0o600)
        self.assertEqual(load(self.directory).nickname, load(node).nickname)
        self.assertTrue(load(node).nickname)
        aliases.write_bytes(b"home: URI:DIR2:\xff\n")
        self.directory = Path(self.mktemp())
        self.assertIn(
            "aliases:1: it is not UTF-8", self.init("--tahoe", str(node), status=2).stderr
        )

    def test_a_tahoe_node_whose_files_cannot_be_read(self) -> None:
        """Nothing is made of it: its servers would be missing, and nobody would know."""
        for name, content, words in (
            ("servers", b'storage: {"\xff": {}}', "it is not UTF-8"),
            ("introducers", b"\xff", "it is not UTF-8"),
            ("servers", "storage: {}".encode("utf-16"), "it is UTF-16"),
            ("servers", None, "Is a directory"),
            ("introducers", None, "Is a directory"),
        ):
            node = Path(self.mktemp())
            make_node(node)
            file = node / "private" / f"{name}.yaml"
            file.unlink(missing_ok=True)
            if content is None:
                file.mkdir()
            else:
                file.write_bytes(content)
            run = self.init("--tahoe", str(node), status=2)
            self.assertIn(f"{name}.yaml", run.stderr)
            self.assertIn(words, run.stderr)
            self.assertFalse(self.directory.exists())

    def test_a_link_to_the_settings(self) -> None:
        """Stays; the file changes."""
        self.init()
        settings, other = self.directory / "pipegrid.cfg", Path(self.mktemp())
        settings.rename(other)
        settings.symlink_to(other.absolute())
        self.init("-k", "2")
        self.assertTrue(settings.is_symlink())
        self.assertIn("shares.needed = 2", other.read_text())

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


class NumbersTests(SynchronousTestCase):
    """How files are encoded: chosen by the number of servers, said, and changed later."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def init(self, *arguments: str, status: int = 0) -> Run:
        run = Run("-d", str(self.directory), "--json", "init", *arguments)
        self.assertEqual(self.successResultOf(run.finished), status, run.stderr)
        return run

    def numbers(self) -> tuple[int, int, int]:
        """What the directory says: k, happy, n."""
        config = load(self.directory)
        return config.params.required_shares, config.happy, config.params.total_shares

    def servers_file(self, count: int) -> str:
        path = Path(self.mktemp())
        entry = {
            f"s{number}": {"ann": {"anonymous-storage-NURLs": [nurl(number)]}}
            for number in range(count)
        }
        path.write_text(json.dumps({"storage": entry}))
        return str(path)

    def test_they_work_with_any_number_of_servers(self) -> None:
        """A local grid or a file of servers: never more wanted than there are; from ten on as ever."""
        for count in (*range(1, 13), 40):
            for servers in (str(count), self.servers_file(count)):
                self.directory = Path(self.mktemp())
                run = self.init("--servers", servers)
                k, happy, n = self.numbers()
                self.assertTrue(1 <= k <= happy <= n <= count, (count, k, happy, n))
                self.assertTrue(k < happy or n == 1)
                if count >= 10:
                    self.assertEqual((k, happy, n), (3, 7, 10))
                if count >= 3:
                    self.assertLess(happy, count)  # one may be away
                shares = "1 share" if n == 1 else f"{n} shares"
                self.assertIn(f"any {k} of {shares} restore a file", run.stderr)
                self.assertIn(f"an upload needs {happy} of the {count} server", run.stderr)

    def test_the_documented_table(self) -> None:
        """docs/reference-cli.md has the numbers for up to ten servers."""
        page = (Path(__file__).parent.parent.parent / "docs" / "reference-cli.md").read_text()
        rows = {
            option: [int(cell) for cell in line.split("|")[2:-1]]
            for line in page.splitlines()
            for option in ("(`-k`)", "(`--happy`)", "(`-n`)")
            if line.startswith("| ") and option in line.split("|")[1]
        }
        for servers in range(1, 11):
            params, happy = suggested(servers)
            documented = tuple(
                rows[option][servers - 1] for option in ("(`-k`)", "(`--happy`)", "(`-n`)")
            )
            self.assertEqual((params.required_shares, happy, params.total_shares), documented)

    def test_four_servers(self) -> None:
        """The case of the documentation; with a number of one's own the others follow."""
        self.init("--servers", self.servers_file(4))
        self.assertEqual(self.numbers(), (2, 3, 4))
        for arguments, numbers in (
            (["-n", "3"], (2, 3, 3)),
            (["-k", "4"], (4, 3, 4)),
            (["-n", "1"], (1, 1, 1)),
            (["--happy", "1", "-n", "8"], (2, 1, 8)),
        ):
            self.directory = Path(self.mktemp())
            self.init("--servers", self.servers_file(4), *arguments)
            self.assertEqual(self.numbers(), numbers)

    def test_introducers_know_the_servers(self) -> None:
        """Nobody can tell how many yet: 3, 7 and 10."""
        run = self.init("--introducer", str(FURL))
        self.assertEqual(self.numbers(), (3, 7, 10))
        self.assertIn("an upload needs 7 servers;", run.stderr)

    def test_changing_them_later(self) -> None:
        """Comments and other settings stay; what was not given stays, as far as it goes with the rest."""
        self.init("--servers", "4")
        path = self.directory / "pipegrid.cfg"
        path.write_text("# mine\n" + path.read_text() + "# the end\n")
        mode = path.stat().st_mode
        for arguments, numbers in (
            (["-k", "1"], (1, 3, 4)),
            (["-n", "2"], (1, 2, 2)),
            (["-n", "10", "--happy", "4", "-k", "3"], (3, 4, 10)),
            (["--happy", "1"], (3, 1, 10)),
        ):
            run = self.init(*arguments)
            self.assertEqual(self.numbers(), numbers)
            self.assertIn(f"any {numbers[0]} of {numbers[2]} shares", run.stderr)
        self.init("--segment-size", "128KiB")
        self.init("--segment-size", "256KiB")
        self.assertEqual(load(self.directory).params.max_segment_bytes, 256 << 10)
        text = path.read_text()
        self.assertTrue(text.startswith("# mine\n") and text.endswith("# the end\n"), text)
        self.assertEqual(text.count("segment_size"), 1)
        self.assertEqual((path.stat().st_mode, load(self.directory).local.servers), (mode, 4))  # type: ignore[union-attr]

    def test_whatever_the_file_looks_like(self) -> None:
        """No section yet, values on several lines, capitals, ends as on Windows."""
        self.init("--servers", "4")
        path = self.directory / "pipegrid.cfg"
        for text in (
            "",
            "[local]\nservers=4\n",
            "[client]",
            "[node]\nnickname = me\n[client]\nShares.Needed: 3\nshares.total =\n  10\n[local]\n",
            "[client]\r\nshares.needed = 3\r\npeers.preferred = a,\r\n  b\r\n[local]\r\nservers = 4\r\n",
        ):
            path.write_bytes(text.encode())
            before = load(self.directory)
            self.init("-k", "1", "-n", "5", "--happy", "2")
            self.assertEqual(self.numbers(), (1, 2, 5))
            after = load(self.directory)
            self.assertEqual(
                (after.preferred, after.nickname, after.local),
                (before.preferred, before.nickname, before.local),
            )
            self.assertEqual(b"\r\n" in path.read_bytes(), "\r\n" in text)

    def test_what_cannot_be_changed(self) -> None:
        """Status 2, and the file is as it was."""
        self.init("--servers", "4")
        text = (self.directory / "pipegrid.cfg").read_text()
        for arguments, words in (
            (["--happy", "5"], "4 shares can never be on 5 servers"),
            (["--happy", "5", "-n", "10"], "4 servers can never hold a file on 5 of them"),
            (["-k", "5"], "cannot encode 5 of 4"),
            (["--servers", "4", "-k", "1"], "is configured already"),
            ([], "change its numbers with -k, -n, --happy and --segment-size alone"),
        ):
            self.assertIn(words, self.init(*arguments, status=2).stderr)
            self.assertEqual((self.directory / "pipegrid.cfg").read_text(), text)
        make_node(self.directory / "node")
        self.directory /= "node"
        self.assertIn("never written", self.init("-k", "1", status=2).stderr)

    def test_a_full_disk(self) -> None:
        """Is no mistake of the command line: status 1, and the same command goes on when there is room."""
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(creation, "create_file", side_effect=full):
            words = "a grid directory: No space left on device; free some space\n"
            self.assertIn(words, self.init(status=1).stderr)
        self.init()
        text = (self.directory / "pipegrid.cfg").read_text()
        with mock.patch.object(creation, "replace_file", side_effect=full):
            words = "No space left on device; nothing was changed; free some space\n"
            self.assertIn(words, self.init("-k", "1", status=1).stderr)
        self.assertEqual((self.directory / "pipegrid.cfg").read_text(), text)
