"""``pipegrid invite``, ``join`` and ``serve --join``: three people form a grid, and what may go wrong."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
from pathlib import Path
from typing import IO
from unittest import mock

from misc.speedtest.peers.nodes import free_port
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import cmd_join
from pipegrid.cli.console import Console
from pipegrid.core.caps import DirectoryCap, parse_cap
from pipegrid.errors import UsageError
from pipegrid.grid import client_config, invite_and_join, user_grids
from pipegrid.grid.client_creation import create_local
from pipegrid.grid.invitation_messages import Invitation
from pipegrid.tree.aliases import read_aliases
from tests.cli.processes import ProcessTestCase
from tests.cli.support import Run
from tests.grid.test_invitation import LITERAL
from tests.grid.test_invite_and_join import invited, names_in

LINE_S = 60.0


def quiet() -> Console:
    """Return a console that no one reads."""
    return Console(None, None, io.StringIO())


def line_of(stream: IO[str] | None) -> str:
    """Return the next line of a process, which must come in time."""
    assert stream is not None
    ready, _, _ = select.select([stream], [], [], LINE_S)
    assert ready, "nothing was printed"
    return stream.readline().strip()


class ThreeFriendsTests(ProcessTestCase):
    """Real processes, with the inviter's own relay on loopback."""

    def setUp(self) -> None:
        super().setUp()
        self.relay_port = free_port()
        self.relay = ("--relay-url", f"ws://127.0.0.1:{self.relay_port}/v1")
        self.commands = 0

    def background(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command that goes on until the test ends."""
        self.commands += 1
        process = self.start(*arguments)

        def end() -> None:
            process.terminate()
            process.communicate(timeout=LINE_S)

        self.addCleanup(end)
        return process

    def foreground(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Run a command to its end."""
        self.commands += 1
        return self.run_command(*arguments, status=status)

    def invite(self, who: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        """Start an invitation; returns it with its code."""
        listen = ("--listen", f"127.0.0.1:{self.relay_port}")
        process = self.background("-d", who, "invite", *listen, *arguments)
        return process, line_of(process.stdout)

    def ended(self, process: subprocess.Popen[str], status: int = 0) -> str:
        """Wait for the end of an invitation; returns what it said."""
        _, said = process.communicate(timeout=LINE_S)
        self.assertEqual(process.returncode, status, said)
        self.assertNotIn("Traceback", said)
        return said

    def serve(self, who: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a server, and wait until it serves."""
        process = self.background(
            "-d", who, "serve", "--port", "tcp:0:interface=127.0.0.1", *arguments
        )
        self.assertRegex(line_of(process.stdout), "^pb://")
        return process

    def test_a_grid_in_a_minute(self) -> None:
        """Three servers and a client, from nothing: at most 12 commands, and no file edited."""
        self.serve("alice")
        for who in ("bob", "carol"):
            inviting, code = self.invite("alice")
            self.serve(who, "--join", code, *self.relay)
            self.assertIn("added the server", self.ended(inviting))
        inviting, code = self.invite("alice")
        said = self.foreground("-d", "dave", "join", code, *self.relay)[1]
        self.assertIn(
            "any 1 of 3 shares restore a file, and an upload needs 2 of the 3 servers", said
        )
        self.ended(inviting)
        (self.home / "file").write_bytes(os.urandom(100_000))
        cap, _ = self.foreground("-d", "carol", "put", "file")
        self.foreground("-d", "dave", "get", cap, "-o", "copy")
        self.assertEqual((self.home / "copy").read_bytes(), (self.home / "file").read_bytes())
        self.assertLessEqual(self.commands, 12)
        # Bob joined before there was Carol's server: another invitation brings him up to date.
        inviting, code = self.invite("alice")
        _, said = self.foreground("-d", "bob", "join", code, *self.relay)
        self.assertIn("uses this grid already; 1 server added", said)
        self.ended(inviting)
        self.assertEqual(len(names_in(self.home / "bob")), 3)

    def test_a_server_that_joins_later(self) -> None:
        """By the invitation of one of three friends: the others find it, and no file is edited."""
        self.serve("alice")
        for who in ("bob", "carol"):
            inviting, code = self.invite("alice")
            self.serve(who, "--join", code, *self.relay)
            self.ended(inviting)
        inviting, code = self.invite("carol")
        said = self.serve("dave", "--join", code, *self.relay)
        furl = (self.home / "dave/private/storage.furl").read_text()
        self.assertIn("added the server", self.ended(inviting))
        dave = (self.home / "dave/node.pubkey").read_text().strip().removeprefix("pub-")
        for who in ("alice", "bob", "carol", "dave"):
            known = names_in(self.home / who)
            self.assertEqual(dave in known, who in ("carol", "dave"), known)
            out, _ = self.run_command("--json", "-d", who, "status")
            servers = [json.loads(line) for line in out.splitlines()]
            ids = [each["server_id"] for each in servers if "server_id" in each]
            self.assertEqual(len(ids), 4, (who, out))
            self.assertIn(dave, ids)
        said.terminate()
        _, log = said.communicate(timeout=LINE_S)
        self.assertIn("added to the inviter's list, and announced to the introducer", log)
        # It finds the others again, and they it, at its later starts, also while Alice is away.
        process = self.background("-d", "dave", "serve")
        self.assertRegex(line_of(process.stdout), "^pb://")
        port = furl.rpartition("/")[0].rpartition(":")[2]
        config = (self.home / "dave/pipegrid.cfg").read_text()
        self.assertIn(f"tub.port = tcp:{port}:interface=127.0.0.1\n", config)

    def test_what_is_shared(self) -> None:
        """Directories become aliases: with --read-only they can be read, and otherwise changed, too."""
        self.serve("alice")
        self.ended_by_ctrl_c(*self.invite("alice"))  # makes the directory a client's
        self.run_command("-d", "alice", "alias", "create", "photos")
        self.run_command("-d", "alice", "mkdir", "photos:2024")
        for who, options in (("bob", ()), ("carol", ("--read-only",))):
            inviting, code = self.invite("alice", "photos:", "photos:2024", *options)
            _, said = self.run_command("-d", who, "join", code, *self.relay)
            self.ended(inviting)
            self.assertIn("'photos:' is a directory", said)
            listed, _ = self.run_command("-d", who, "ls", "photos:")
            self.assertIn("2024/", listed.splitlines())
            self.run_command("-d", who, "mkdir", f"photos:{who}", status=2 if options else 0)
            self.run_command("-d", who, "ls", "2024:")
        _, said = self.run_command("-d", "alice", "invite", "nothing:", status=2)
        self.assertIn("there is no alias 'nothing'", said)

    def ended_by_ctrl_c(self, process: subprocess.Popen[str], _code: str) -> None:
        """Interrupt an invitation."""
        process.terminate()
        self.assertIn("interrupted", self.ended(process, 130))

    def test_a_wrong_code(self) -> None:
        """One sentence at each end; nothing is made, and the code is spent."""
        self.serve("alice")
        inviting, code = self.invite("alice")
        wrong = f"{code.partition('-')[0]}-wrong-words"
        _, said = self.run_command("-d", "bob", "join", wrong, *self.relay, status=1)
        self.assertEqual(
            said,
            "pipegrid: the code was entered wrongly, or guessed, and cannot be used again; ask for a "
            "new code\n",
        )
        self.assertIn("cannot be used again; run 'pipegrid invite' again", self.ended(inviting, 1))
        self.assertFalse((self.home / "bob").exists())

    def test_a_server_that_cannot_join(self) -> None:
        """It stops with a sentence, and the directory is not configured."""
        _, said = self.run_command(
            *("-d", "bob", "serve", "--port", "0", "--join", "7-a-b", *self.relay), status=1
        )
        self.assertIn("cannot reach the relay", said)
        self.assertIn("if it is the inviter's own, the code was used or has expired", said)
        self.assertEqual(len(said.splitlines()), 1, said)
        self.assertFalse((self.home / "bob/pipegrid.cfg").exists())

    def test_no_grid_to_invite_to(self) -> None:
        """Neither where nothing is, nor from the grid of this machine."""
        _, said = self.run_command("invite", status=2)
        self.assertIn("no grid is configured", said)
        (self.home / "a").write_text("a" * 100)
        self.run_command("put", "a")
        _, said = self.run_command("invite", status=2)
        self.assertIn("which no other client reaches; start a server in a new directory", said)

    def test_profiles(self) -> None:
        """A first grid takes the place of the automatic one, a second gets a name."""
        (self.home / "a").write_text("a" * 100)
        self.run_command("put", "a")
        self.serve("alice")
        self.serve("zoe")
        inviting, code = self.invite("alice")
        _, said = self.run_command("join", code, *self.relay)
        self.assertIn("the grid on this machine was moved to", said)
        self.ended(inviting)
        inviting, code = self.invite("zoe")
        _, said = self.run_command("join", code, *self.relay, status=1)
        self.assertIn("uses another grid already, and was not changed; ask for a new code", said)
        self.assertIn("the other end did not join", self.ended(inviting, 1))
        inviting, code = self.invite("zoe")
        _, said = self.run_command("--grid", "zoe", "join", code, *self.relay)
        self.assertIn("'pipegrid --grid zoe' uses this grid", said)
        self.ended(inviting)
        cap, _ = self.run_command("--grid", "zoe", "put", "a")
        self.run_command("--grid", "zoe", "cat", cap)
        self.run_command("cat", cap, status=4)
        _, said = self.run_command("--grid", "nowhere", "put", "a", status=2)
        self.assertIn("names no grid 'nowhere' (there are zoe)", said)


class PlaceTests(SynchronousTestCase):
    """Where a grid is joined, and what is asked before the code is used."""

    def setUp(self) -> None:
        self.own = Path(self.mktemp())

    def test_a_free_place(self) -> None:
        """Nothing is asked where nothing is configured, or only the automatic grid."""
        self.assertEqual(cmd_join.place_to_join(self.own, None, self.fail).directory, self.own)
        create_local(self.own, servers=1, automatic=True)
        self.assertEqual(cmd_join.place_to_join(self.own, None, self.fail).directory, self.own)

    def test_a_second_grid(self) -> None:
        """The name is that of an option, or of the answer; without one the code must be for the same grid."""
        invite_and_join.create_member(self.own, invited(1))
        place = self.own / "grids/friends"
        self.assertEqual(cmd_join.place_to_join(self.own, "friends", self.fail).directory, place)
        found = cmd_join.place_to_join(self.own, None, lambda own: "friends")
        self.assertEqual((found.directory, found.name), (place, "friends"))
        self.assertEqual(
            cmd_join.place_to_join(self.own, None, lambda own: None).directory, self.own
        )
        with self.assertRaises(UsageError):
            cmd_join.place_to_join(self.own, "../x", self.fail)

    def test_a_named_first_grid(self) -> None:
        """The user's own directory is the grid's, and has its name."""
        place = cmd_join.place_to_join(self.own, "friends", self.fail)
        cmd_join.join(quiet(), place, invited(1))
        self.assertEqual(user_grids.grids_of(self.own), {"friends": self.own})

    def test_a_terminal_is_asked(self) -> None:
        """And nothing else."""
        self.assertIsNone(cmd_join._ask_name(self.own))
        with (
            mock.patch("sys.stdin", mock.Mock(isatty=lambda: True)),
            mock.patch("click.prompt", return_value=" Friends "),
        ):
            self.assertEqual(cmd_join._ask_name(self.own), "friends")


def directory(text: str) -> DirectoryCap:
    """Return the literal cap with this text."""
    cap = parse_cap(f"URI:DIR2-LIT:{text}")
    assert isinstance(cap, DirectoryCap)
    return cap


class LyingInviterTests(SynchronousTestCase):
    """What an invitation cannot do."""

    def setUp(self) -> None:
        self.own = Path(self.mktemp())
        invite_and_join.create_member(self.own, invited(1), aliases=f"mine: {LITERAL}\n")

    def join(self, taken: Invitation) -> list[str]:
        """Join in the configured directory; returns new aliases."""
        place = cmd_join.JoinPlace(self.own, self.own, None)
        return cmd_join.join(quiet(), place, taken)[1]

    def test_existing_aliases_stay(self) -> None:
        """Another cap under a known name gets a new one; a known cap gets none."""
        other = directory("me2a")
        self.assertEqual(self.join(invited(1, caps={"mine": other, "again": LITERAL})), ["mine-2"])
        found = read_aliases(self.own)
        self.assertEqual(found, {"mine": str(LITERAL), "mine-2": str(other)})

    def test_names_of_aliases(self) -> None:
        """None adds a line, leads to a path, or shows as something else."""
        caps = {
            name: directory(text)
            for name, text in (("a\nb: c", "ae"), ("../x", "ai"), ("\x1b[2J", "am"), ("URI", "aq"))
        }
        self.assertEqual(
            self.join(invited(1, caps=caps)), ["shared", "shared-2", "shared-3", "shared-4"]
        )
        self.assertEqual(len((self.own / "private/aliases").read_text().splitlines()), 5)

    def test_chosen_settings_stay(self) -> None:
        """The numbers, the secrets and the servers of a directory are the user's."""
        before = client_config.load(self.own)
        self.join(invited(1, nickname="evil"))
        after = client_config.load(self.own)
        self.assertEqual(after, before)


class ArgumentTests(SynchronousTestCase):
    """What is refused before anything is sent."""

    def refused(self, *arguments: str) -> str:
        """Return the error of a command line."""
        run = Run("-d", self.mktemp(), *arguments)
        self.assertEqual(self.successResultOf(run.finished), 2, run.stderr)
        return run.stderr

    def test_arguments(self) -> None:
        """Each has its sentence."""
        self.assertIn("is not a code", self.refused("join", "guitarist"))
        self.assertIn("is not a relay's address", self.refused("join", "7-a-b", "--relay-url", "x"))
        self.assertIn("is not a relay's address", self.refused("invite", "--relay-url", "x"))
        for text in ("x", "1:2:x", "127.0.0.1:70000", "a b:1"):
            self.assertIn("is neither PORT nor HOST:PORT", self.refused("invite", "--listen", text))
        self.assertIn("--expires", self.refused("invite", "--expires", "1 s"))
