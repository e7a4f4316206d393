"""Standard output that nobody reads, or that cannot be written: whichever command, and with ``--json``."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.cli.processes import TIMEOUT_S, ProcessTestCase


class StdoutTests(ProcessTestCase):
    """Commands whose results go to a pipe without a reader, or to a full disk."""

    def setUp(self) -> None:
        super().setUp()
        for number in range(30):
            path = self.home / f"d/{number % 3}/{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(number) * 200)
        self.run_command("alias", "create", "home")
        self.data = self.home / ".local/share/pipegrid"

    def into(self, stdout: int, *arguments: str) -> tuple[int, str]:
        """Run a command with this standard output; returns status and prose."""
        ended = subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
        )
        return ended.returncode, ended.stderr

    def closed(self, *arguments: str) -> tuple[int, str]:
        """Run a command whose reader has left."""
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return self.into(writer, *arguments)
        finally:
            os.close(writer)

    def full(self, *arguments: str) -> tuple[int, str]:
        """Run a command whose results go to a full disk."""
        with open("/dev/full", "wb") as file:
            return self.into(file.fileno(), *arguments)

    @property
    def kept(self) -> list[str]:
        """The lines of the file with the caps that could not be printed."""
        path = self.data / "private/unprinted.caps"
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        return path.read_text().splitlines()

    def test_nobody_reads(self) -> None:
        """The command ends quietly, with the documented status, and blames no file."""
        tree, _ = self.run_command("put", "-r", "d")
        cap, _ = self.run_command("put", "d/0/0")
        catalogue, _ = self.run_command("backup", "-q", "d")
        self.run_command("cp", "-r", "d", "home:")
        (self.home / "caps").write_text(f"{cap}\n{tree}/1/1\n{tree}/2/2\n")
        for number, words in enumerate(
            (
                ("restore", catalogue, "-o", "back"),
                ("get", "-r", tree, "-o", "got"),
                ("get", "--cap-file", "caps", "-o", "some"),
                ("check", "--cap-file", "caps"),
                ("check", "-r", tree),
                ("renew", "-r", tree),
                ("repair", "--cap-file", "caps"),
                ("ls", "-R", tree),
                ("ls", tree),
                ("du", tree),
                ("stats", tree),
                ("manifest", tree),
                ("status",),
                ("alias", "list"),
                ("backups",),
                ("storage-index", "--cap-file", "caps"),
                ("put", "d/0/0", "d/1/1", "d/2/2"),
                ("put", "-r", "d"),
                ("cp", "-r", "d", "home:new"),
                ("backup", "d"),
                ("put", "d/0/0", "nothing", "d/1/1"),
                ("check", cap, tree),
                ("encode", "d/0/0", "--shares", "shares"),
                ("mkdir", "home:another"),
            )
        ):
            status, prose = self.closed("-q", "--json", *words)
            if words[0] == "mkdir":  # whose cap nobody else may have
                self.assertIn("the cap is saved in ", prose)
                continue
            self.assertEqual((status, prose), (1, ""), (number, words))

    def test_caps_that_cannot_be_printed(self) -> None:
        """A cap that nobody else has is kept, and the message says where."""
        where = f"saved in {self.data / 'private/unprinted.caps'}\n"
        path = Path("d/0/0")
        for words, start in (
            (("put", "--mutable", str(path)), "URI:SSK:"),
            (("put", "--random-key", str(path)), "URI:CHK:"),
            (("put", "-r", "--random-key", "d"), "URI:DIR2-CHK:"),
            (("mkdir",), "URI:DIR2:"),
            (("put", "--mutable", str(path), "home:file"), "URI:SSK:"),
        ):
            for run, why in (
                (self.full, "No space left on device"),
                (self.closed, "no program reads"),
            ):
                status, prose = run("-q", *words)
                self.assertEqual((status, prose.count("pipegrid: ")), (1, 1), prose)
                self.assertTrue(prose.endswith(where) and why in prose, (words, prose))
                self.assertTrue(self.kept[-1].startswith(start), words)
                if words[-1] == "home:file":
                    self.run_command("rm", "home:file")
        out, _ = self.run_command("get", *self.kept[0].split()[:1])
        self.assertEqual(out, "0" * 200)
        status, prose = self.full("-q", "put", "--random-key", "d/1/1", "d/2/2", "d/0/3")
        self.assertEqual(status, 1)
        self.assertIn(where, prose)

    def test_caps_that_cannot_be_kept(self) -> None:
        """They are in the message then."""
        (self.data / "private/unprinted.caps").mkdir()
        status, prose = self.full("-q", "put", "--mutable", "d/0/0")
        self.assertEqual(status, 1)
        self.assertRegex(
            prose, r"cannot be written \(Is a directory\): URI:SSK:[a-z2-7:]+  d/0/0\n$"
        )

    def test_an_alias_is_written_all_the_same(self) -> None:
        """It is where the cap is kept."""
        status, prose = self.full("alias", "create", "new")
        self.assertEqual(status, 1, prose)
        self.assertIn("No space left on device", prose)
        self.run_command("ls", "new:")
