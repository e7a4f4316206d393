"""Slips of who types commands: the message names what was meant."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.archive_file import quoted
from tests.cli.processes import ProcessTestCase

CHK = f"URI:CHK:{'a' * 26}:{'b' * 51}a:3:10:1000"


class FilesOfCapsTests(ProcessTestCase):
    """A file that holds a cap, named where the cap itself is wanted."""

    def setUp(self) -> None:
        super().setUp()
        self.run_command("init", "--servers", "1")
        (self.home / "fox.cap").write_text(f"# the fox\n\n  {CHK}  fox.txt\n")

    def refused(self, words: str, *arguments: str) -> None:
        """In one sentence."""
        out, err = self.run_command(*arguments, status=2)
        self.assertEqual((out, err.count("\n")), ("", 1), err)
        self.assertIn(words, err)
        self.assertNotIn("URI:CHK:aaa", err)

    def test_commands_that_take_cap_files(self) -> None:
        """The option is named, with the file as a shell wants it."""
        words = (
            "fox.cap is not a cap, but a file that contains one; did you mean --cap-file fox.cap?\n"
        )
        for command in (
            ("get",),
            ("get", "-o", "there"),
            ("cat",),
            ("check",),
            ("check", "-r"),
            ("repair",),
            ("renew",),
            ("storage-index",),
            ("decode", "-o", "there"),
        ):
            self.refused(words, *command, "fox.cap")
        os.rename(self.home / "fox.cap", self.home / "my fox")
        self.refused("did you mean --cap-file 'my fox'?", "get", "my fox")

    def test_others(self) -> None:
        """They want the cap."""
        words = "fox.cap is not a cap, but a file that contains one; give that cap itself\n"
        for command in (
            ("get", "-r", "-o", "there"),
            ("ls",),
            ("du",),
            ("stats",),
            ("manifest",),
            ("rm",),
            ("mkdir",),
            ("alias", "add", "fox"),
            ("backups",),
            ("mirror", "debian", "there", "--from-grid"),
        ):
            self.refused(words, *command, "fox.cap")
        self.refused(words, "ln", "fox.cap", "home:x")

    def test_other_files(self) -> None:
        """What holds no cap is told of as before; what would be waited for is not opened."""
        (self.home / "empty").touch()
        (self.home / "other").write_bytes(b"\xff\0 URI:CHK:\n" + CHK.encode())
        (self.home / "directory").mkdir()
        os.mkfifo(self.home / "pipe")
        for name in ("empty", "other", "directory", "pipe", "nowhere", "fox.cap/x"):
            self.refused("is not a cap that PipeGrid knows", "get", name)
            self.refused("does not begin with a cap or an alias", "ls", name)


class RestoreTests(ProcessTestCase):
    """``restore NAME``: what looks like the name of a backup is a path in it."""

    def setUp(self) -> None:
        super().setUp()
        (self.home / "papers").mkdir()
        (self.home / "papers/plan").write_text("ten")
        self.run_command("init", "--servers", "1")
        self.cap, _ = self.run_command("backup", "papers")

    def test_a_name_in_the_place_of_a_path(self) -> None:
        """With the list's cap, and without."""
        words = "there is no 'papers' in the run; for the backup of that name say --as papers\n"
        for before in ((), (self.cap,)):
            for name in ("papers", "papers/"):
                _, err = self.run_command("restore", *before, name, "-o", "there", status=2)
                self.assertIn(words, err)
        _, err = self.run_command("restore", "plans", "-o", "there", status=2)
        self.assertIn("there is no 'plans'; ", err)
        self.run_command("restore", "--as", "papers", "-o", "there")
        self.assertEqual((self.home / "there/plan").read_text(), "ten")

    def test_a_name_beside_a_path(self) -> None:
        """Two paths are refused, and ``--as`` is named."""
        for arguments, words in (
            (
                ("papers", "plan"),
                "'papers' is neither a cap nor an alias; give one PATH, and with --as",
            ),
            (
                (self.cap, "papers", "plan"),
                "give one CAP and one PATH; --as NAME says of which backup",
            ),
            (("list.cap", "plan"), "list.cap is not a cap, but a file that contains one"),
        ):
            (self.home / "list.cap").write_text(self.cap + "\n")
            _, err = self.run_command("restore", *arguments, "-o", "there", status=2)
            self.assertIn(words, err)
        _, err = self.run_command("restore", "list.cap", "-o", "there", status=2)
        self.assertIn(
            "list.cap is not a cap, but a file that contains one; give that cap itself\n", err
        )


class SecretTests(ProcessTestCase):
    """``--convergence`` with something that is no secret."""

    def test_what_is_no_base32(self) -> None:
        """It is said what is wrong, and what to do."""
        (self.home / "file").write_text("x" * 100)
        for text, words in (
            ("a", "base32 text cannot be 1 character long; "),
            ("abc", "base32 text cannot be 3 characters long; "),
            ("A1", "base32 text may only hold a-z and 2-7; "),
        ):
            _, err = self.run_command("put", "file", "--convergence", text, status=2)
            self.assertIn(f"{words}copy all of the secret, as it is in 'private/convergence'", err)


class DestinationTests(ProcessTestCase):
    """A file where a directory is to be made."""

    def test_it_is_named(self) -> None:
        """It stays, and the sentence says what to do."""
        self.run_command("init", "--servers", "1")
        (self.home / "file").write_text("mine")
        (self.home / "tree").mkdir()
        (self.home / "tree/a").write_text("x" * 100)
        cap, _ = self.run_command("put", "-r", "tree")
        self.run_command("backup", "tree")
        for command in (
            ("get", "-r", cap, "-o", "file"),
            ("get", "-r", cap, "-f", "-o", "file/below"),
            ("get", f"{cap}/a", "URI:LIT:nbswy3dp", "-o", "file"),
            ("restore", "-o", "file"),
        ):
            _, err = self.run_command(*command, status=1)
            self.assertIn(
                "a file is in its way; choose another directory, or move the file away\n", err
            )
            self.assertEqual((self.home / "file").read_text(), "mine")


class CutTextTests(SynchronousTestCase):
    """What strangers have written, in a sentence."""

    def test_ascii(self) -> None:
        """That it is cut is seen without escapes."""
        self.assertEqual(quoted("a" * 9, 4), "'aaaa...'")
        self.assertEqual(quoted("\xe4" * 2, 4), "'\\xe4\\xe4'")
