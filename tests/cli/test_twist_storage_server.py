"""``twist pipegrid``: the options, and what the directory says beside them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from misc.command import environment
from twisted.internet.defer import Deferred
from twisted.internet.testing import MemoryReactor
from twisted.python import usage
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import twist_storage_server
from pipegrid.cli.error_report import ExitStatus
from pipegrid.errors import UsageError
from pipegrid.server.serve import ServeSettings
from tests.grid.introducer_support import FURL

TWIST = ("-m", "twisted")
TWISTD = ("-c", "from twisted.scripts.twistd import run; run()", "-n", "--pidfile=")


class PluginTests(SynchronousTestCase):
    """Options in, settings out."""

    def test_it_is_found(self) -> None:
        """``twist`` finds the service, and its options are the server's."""
        from twisted.application.service import IServiceMaker
        from twisted.plugin import getPlugins

        makers = {maker.tapname: maker for maker in getPlugins(IServiceMaker)}
        self.assertIs(makers["pipegrid"].options, twist_storage_server.Options)

    def test_options(self) -> None:
        """They are those of ``pipegrid serve``."""
        options = twist_storage_server.Options()
        arguments = [
            "--port",
            "0",
            "--durability",
            "none",
            "--read-only",
            "--keep-unfinished",
            "12h",
            "--reserved-space",
            "1.5G",
            "--quota",
            "2G",
            "--introducer",
            str(FURL),
            "--certificate",
            "/some.cert",
        ]
        options.parseOptions(["-d", "x", *arguments])
        expected = ServeSettings(
            directory=Path("x"),
            port="0",
            durability="none",
            read_only=True,
            keep_unfinished_s=12 * 3600,
            reserved_bytes=3 << 29,
            quota_bytes=2 << 30,
            introducers={"introducer-1": FURL},
            introduces=True,
            certificate_files=(Path("/some.cert"),),
        )
        self.assertEqual(options.settings, expected)

    def test_a_tahoe_nodes_directory(self) -> None:
        """What its ``tahoe.cfg`` says counts, introducers too, unless an option says otherwise."""
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "tahoe.cfg").write_text(
            f"[node]\ntub.port = tcp:1\nnickname = n\n[client]\nintroducer.furl = {FURL}\n"
        )
        options = twist_storage_server.Options()
        options.parseOptions(["-d", str(directory), "--port", "tcp:2"])
        self.assertEqual(
            options.settings,
            ServeSettings(
                directory=directory, port="tcp:2", nickname="n", introducers={"default": FURL}
            ),
        )
        options = twist_storage_server.Options()
        options.parseOptions(["-d", str(directory), "--introducer", "none"])
        self.assertEqual(options.settings.introducers, {})

    def test_no_room_at_all(self) -> None:
        """To leave none free is a choice, too, whatever ``tahoe.cfg`` says."""
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "tahoe.cfg").write_text("[storage]\nreserved_space = 1G\n")
        for words, found in (([], 10**9), (["--reserved-space", "0"], 0)):
            options = twist_storage_server.Options()
            options.parseOptions(["-d", str(directory), *words])
            self.assertEqual(options.settings.reserved_bytes, found)

    def test_refusals(self) -> None:
        """What makes no sense is said before anything starts."""
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "tahoe.cfg").write_text("[storage]\nenabled = false\n")
        for arguments in (
            [],
            ["-d", "x", "--durability", "perhaps"],
            ["-d", "x", "--keep-unfinished", "perhaps"],
            ["-d", "x", "--reserved-space", "some"],
            ["-d", "x", "--introducer", "pb:"],
            ["-d", "x", "--introducer", "configured"],
            ["-d", str(directory)],
        ):
            self.assertRaises(
                usage.UsageError, twist_storage_server.Options().parseOptions, arguments
            )


class StartTests(SynchronousTestCase):
    """A server that cannot start ends its process, as ``pipegrid serve`` does."""

    def run_twist(self, program: tuple[str, ...], *options: str) -> tuple[int, str]:
        """Return the status, and all that was said."""
        done = subprocess.run(
            [sys.executable, *program, "pipegrid", *options],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout

    def test_failures(self) -> None:
        """One sentence, no traceback, status 2 or 1, whatever fails; also of the older ``twistd``."""
        scratch = Path(self.mktemp()).absolute()
        scratch.mkdir()
        (scratch / "file").touch()
        (scratch / "keys/private").mkdir(parents=True)
        (scratch / "keys/private/node.pem").write_text("nothing")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            endpoint = f"tcp:{taken.getsockname()[1]}:interface=127.0.0.1"
            free = "tcp:0:interface=127.0.0.1"
            for program, directory, options, word in (
                (TWIST, "a", ("--port", endpoint), "choose another port"),
                (TWIST, "b", ("--port", free, "--metrics", endpoint), "choose another port"),
                (TWISTD, "c", ("--port", "nonsense:1"), "is not a port or endpoint"),
                (TWIST, "d", ("--port", free, "--storage", str(scratch / "file")), "file"),
                (TWIST, "keys", ("--port", free), "node.pem"),
            ):
                status, said = self.run_twist(program, "-d", str(scratch / directory), *options)
                self.assertEqual(status, ExitStatus.USAGE, said)
                self.assertIn(word, said)
                self.assertNotIn("Traceback", said)

    def start(
        self, result: Deferred[Any], running: bool
    ) -> tuple[twist_storage_server.ExitWithStatus, Any]:
        """Return what a service that starts so leaves for the end of its process, and its reactor."""
        ended: list[int] = []
        exits = twist_storage_server.ExitWithStatus(ended.append)
        reactor: Any = MemoryReactor()
        reactor.running = running
        service = twist_storage_server.StorageService(
            reactor, ServeSettings(directory=Path(self.mktemp())), exits
        )
        self.patch(service.node, "start", lambda: result)
        self.ended = ended
        service.startService()
        return exits, reactor

    def test_a_failure_once_the_reactor_runs(self) -> None:
        """It stops the reactor, and the process ends with the status after all else."""
        result: Deferred[Any] = Deferred()
        exits, reactor = self.start(result, running=True)
        result.errback(OSError("the disk is gone"))
        self.flushLoggedErrors()
        self.assertTrue(reactor.hasStopped)
        exits.at_exit()
        self.assertEqual(self.ended, [ExitStatus.FAILED])

    def test_a_failure_before(self) -> None:
        """It is raised, since a reactor that does not run cannot be stopped."""
        result: Deferred[Any] = Deferred()
        result.errback(UsageError("no"))
        with self.assertRaises(SystemExit) as raised:
            self.start(result, running=False)
        self.assertEqual(raised.exception.code, ExitStatus.USAGE)

    def test_all_well(self) -> None:
        """The process ends as any other."""
        exits, _ = self.start(Deferred(), running=True)
        exits.at_exit()
        self.assertEqual(self.ended, [])
