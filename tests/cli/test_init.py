"""``pipegrid init`` for grids that are there: introducers, files of servers, Tahoe-LAFS nodes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from unittest import mock

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid import client_creation
from pipegrid.grid.client_config import load
from pipegrid.grid.client_creation import suggested
from pipegrid.wire.server_address import parse_nurl as parse_nurl
from tests.cli.processes import ProcessTestCase
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

    def entries(self) -> dict[str, dict[str, object]]:
        """Return the announcements of the directory's ``servers.yaml``, by id."""
        text = (self.directory / "private/servers.yaml").read_text()
        return {key: entry["ann"] for key, entry in json.loads(text)["storage"].items()}

    def test_addresses(self) -> None:
        """NURLs and fURLs, as arguments or one a line: one server for each key, whatever the order."""
        a, b = parse_nurl(nurl(1)), attrs.evolve(parse_nurl(nurl(2)), swissnum="other")
        second = str(attrs.evolve(a, host="10.0.0.7"))
        its_furl = f"pb://{'a' * 32}@tcp:127.0.0.1:1/{a.swissnum}"
        alone = f"pb://{'b' * 32}@tcp:10.0.0.8:1/alone"
        given = [str(a), its_furl, str(b), second, alone, str(a)]
        file, half = Path(self.mktemp()), Path(self.mktemp())
        text = "\r\n".join(["# mine", "", *given, ""])
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
        half.write_text("\n".join(given[3:]))
        made = []
        for arguments in (given, [str(file)], ["--servers", str(file)], [*given[:3], str(half)]):
            self.directory = Path(self.mktemp())
            (result,) = self.init(*arguments).objects
            self.assertEqual((result["servers"], result["total_shares"]), (3, 3))
            made.append(self.entries())
            first, other, third = made[-1].values()
            self.assertEqual(first["anonymous-storage-NURLs"], [str(a), second])
            self.assertEqual(first["anonymous-storage-FURL"], its_furl)
            self.assertEqual(other["anonymous-storage-NURLs"], [str(b)])
            self.assertEqual(third["anonymous-storage-FURL"], alone)
            self.assertEqual(len(load(self.directory).static.servers), 3)
        self.assertEqual([list(each) for each in made], [list(made[0])] * 4)

    def test_wrong_addresses(self) -> None:
        """The argument or the line is named, the secret is not; nothing is made."""
        bad, yaml = Path(self.mktemp()), Path(self.mktemp())
        bad.write_text(f"{nurl(1)}\npb://secret\n")
        yaml.write_text(json.dumps({"storage": {"a": {"ann": {"anonymous-storage-NURLs": []}}}}))
        for arguments, words in (
            ([nurl(1), "pb://secret"], "address 2: a storage server's NURL looks like"),
            ([str(bad)], f"{bad}:2: a storage server's NURL looks like"),
            (["nowhere"], "nowhere does not exist; give NURLs or fURLs"),
            ([nurl(1), str(yaml)], "a file in the format of servers.yaml is given alone"),
            ([str(yaml)], "names no servers that can be used"),
            ([nurl(1), "--local"], "cannot be; leave one out"),
            ([nurl(1), "--servers", "3"], "cannot be; leave one out"),
        ):
            run = self.init(*arguments, status=2)
            self.assertIn(words, run.stderr)
            self.assertNotIn("secret", run.stderr)
            self.assertFalse(self.directory.exists(), arguments)

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
        self.assertIn("add --local", run.stderr)
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
            (["--servers", str(broken)], "correct it by hand"),
            (["--servers", "300"], "1 to 256"),
            (["--servers", "0"], "1 to 256"),
            (["--tahoe", "nowhere"], "it has no tahoe.cfg"),
            (["--local", "--introducer", str(FURL)], "choose one of"),
            (["--local", "--servers", str(empty)], "give only one"),
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
        with mock.patch.object(client_creation, "create_file", side_effect=full):
            words = "a grid directory: No space left on device; free some space\n"
            self.assertIn(words, self.init(status=1).stderr)
        self.init()
        text = (self.directory / "pipegrid.cfg").read_text()
        with mock.patch.object(client_creation, "replace_file", side_effect=full):
            words = "No space left on device; nothing was changed; free some space\n"
            self.assertIn(words, self.init("-k", "1", status=1).stderr)
        self.assertEqual((self.directory / "pipegrid.cfg").read_text(), text)


class AnotherGridTests(ProcessTestCase):
    """The grid that the first command made, and one that somebody asks for later."""

    FOREIGN = f"URI:DIR2:{'a' * 26}:{'a' * 52}"

    def setUp(self) -> None:
        super().setUp()
        (self.home / "file").write_bytes(b"f" * 3000)
        self.own = self.home / ".local/share/pipegrid"
        self.aside = self.home / ".local/share/pipegrid-local"
        self.cap, _ = self.run_command("put", "file")

    def assert_kept(self, *how: str) -> None:
        """The file that was stored first is still there."""
        self.run_command(*how, "get", self.cap, "-o", "got", "--force")
        self.assertEqual((self.home / "got").read_bytes(), b"f" * 3000)

    def test_it_makes_room(self) -> None:
        """``init`` says where it has moved it, and ``--local`` reaches it from then on, as before."""
        self.assert_kept("--local")
        _, err = self.run_command("init", nurl(1))
        self.assertIn(f"was moved to {self.aside}; 'pipegrid --local' reaches it", err)
        self.assertEqual(len(load(self.own).static.servers), 1)
        self.assert_kept("--local")
        self.assert_kept("-d", str(self.aside))
        _, err = self.run_command("init", nurl(2), status=2)
        self.assertIn("is configured already", err)
        self.run_command("-d", str(self.own), "--local", "status", status=2)

    def test_it_makes_room_twice(self) -> None:
        """What was moved before is never replaced; a directory named with -d makes room as well."""
        self.run_command("init", "--introducer", str(FURL))
        self.own.rename(self.home / "gone")
        second, _ = self.run_command("put", "file")
        _, err = self.run_command("-d", str(self.own), "init", nurl(1))
        self.assertIn(f"'pipegrid -d {self.aside}-2' reaches it", err)
        self.assert_kept("--local")
        self.cap = second
        self.assert_kept("-d", f"{self.aside}-2")

    def test_it_stays(self) -> None:
        """Where nothing else is asked for, where the request is wrong, or where somebody asked for it."""
        self.run_command("init", status=2)
        self.run_command("init", "--local", status=2)
        self.run_command("init", "pb://wrong", status=2)
        self.run_command("init", "--happy", "3")
        self.assert_kept()
        self.assertFalse(self.aside.exists())
        self.run_command("-d", "asked", "init", "--local")
        self.run_command("-d", "asked", "init", nurl(1), status=2)

    def test_without_one(self) -> None:
        """``--local`` says what to do."""
        self.own.rename(self.home / "gone")
        _, err = self.run_command("--local", "status", status=2)
        self.assertIn("there is no grid on this machine", err)

    def test_caps_of_another_grid(self) -> None:
        """That its servers are missing is said when it gets an alias, and when it is listed or fetched."""
        _, err = self.run_command("alias", "add", "friend", self.FOREIGN)
        self.assertIn("no share of this directory is on this machine", err)
        self.assertIn("'pipegrid init NURL...'", err)
        for command in (("ls", "friend:"), ("get", self.cap.replace(self.cap[8:12], "aaaa"))):
            _, err = self.run_command(*command, status=4)
            self.assertEqual(err.count("its servers are missing"), 1, err)
            self.assertIn("'pipegrid init NURL...' joins it", err)
        own, _ = self.run_command("mkdir")
        _, err = self.run_command("alias", "add", "own", own)
        self.assertEqual(err, "")
