"""``twist pipegrid``: the options, and what the directory says beside them."""

from __future__ import annotations

from pathlib import Path

from twisted.python import usage
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import twist_plugin
from pipegrid.server.serve import ServeSettings
from tests.grid.introducer_support import FURL


class PluginTests(SynchronousTestCase):
    """Options in, settings out."""

    def test_it_is_found(self) -> None:
        """``twist`` finds the service, and its options are the server's."""
        from twisted.application.service import IServiceMaker
        from twisted.plugin import getPlugins

        makers = {maker.tapname: maker for maker in getPlugins(IServiceMaker)}
        self.assertIs(makers["pipegrid"].options, twist_plugin.Options)

    def test_options(self) -> None:
        """They are those of ``pipegrid serve``."""
        options = twist_plugin.Options()
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
            "--introducer",
            str(FURL),
        ]
        options.parseOptions(["-d", "x", *arguments])
        expected = ServeSettings(
            directory=Path("x"),
            port="0",
            durability="none",
            read_only=True,
            keep_unfinished_s=12 * 3600,
            reserved_bytes=3 << 29,
            introducers={"introducer-1": FURL},
        )
        self.assertEqual(options.settings(), expected)

    def test_a_tahoe_nodes_directory(self) -> None:
        """What its ``tahoe.cfg`` says counts, introducers too, unless an option says otherwise."""
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "tahoe.cfg").write_text(
            f"[node]\ntub.port = tcp:1\nnickname = n\n[client]\nintroducer.furl = {FURL}\n"
        )
        options = twist_plugin.Options()
        options.parseOptions(["-d", str(directory), "--port", "tcp:2"])
        self.assertEqual(
            options.settings(),
            ServeSettings(
                directory=directory, port="tcp:2", nickname="n", introducers={"default": FURL}
            ),
        )
        options = twist_plugin.Options()
        options.parseOptions(["-d", str(directory), "--introducer", "none"])
        self.assertEqual(options.settings().introducers, {})

    def test_no_room_at_all(self) -> None:
        """To leave none free is a choice, too, whatever ``tahoe.cfg`` says."""
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "tahoe.cfg").write_text("[storage]\nreserved_space = 1G\n")
        for words, found in (([], 10**9), (["--reserved-space", "0"], 0)):
            options = twist_plugin.Options()
            options.parseOptions(["-d", str(directory), *words])
            self.assertEqual(options.settings().reserved_bytes, found)

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
            self.assertRaises(usage.UsageError, twist_plugin.Options().parseOptions, arguments)
