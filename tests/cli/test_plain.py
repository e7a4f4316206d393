"""``pipegrid.cli.startup.fast_mirror_args`` understands what click would, in the same way, or nothing."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import click
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import cmd_mirror, mirror_debian_rpm, mirror_listed_files, mirror_verify
from pipegrid.cli.cmd_mirror import debian_command, list_command, rpm_command, verify_command
from pipegrid.cli.command_grammar import parse
from pipegrid.cli.console import Console
from pipegrid.cli.mirror_debian_rpm import RpmOptions
from pipegrid.cli.mirror_options import MirrorOptions
from pipegrid.cli.startup import fast_mirror_args
from pipegrid.mirror.stat_cache import QuickCheckResult

URL = ("--from", "http://here/")
COMMANDS: dict[str, click.Command] = {
    "list": list_command,
    "rpm": rpm_command,
    "debian": debian_command,
    "verify": verify_command,
}


def console() -> Console:
    """One that nobody reads."""
    return Console(None, None, io.StringIO())


class PlainTests(SynchronousTestCase):
    """Both ways to read a command line."""

    def setUp(self) -> None:
        self.dest = self.mktemp()
        os.mkdir(self.dest)
        self.made: list[tuple[Any, ...]] = []

        def note(*made: Any) -> Any:
            self.made.append(made)
            return object()

        for module, name in (
            (mirror_listed_files, "list_job"),
            (mirror_verify, "verify_job"),
            *product((cmd_mirror, mirror_debian_rpm), ("rpm_job", "debian_job")),
        ):
            self.patch(module, name, note)

    def plainly(self, *arguments: str) -> tuple[Any, ...] | None:
        """What is made of a command line without click; None: nothing."""
        self.made.clear()
        told = console()
        if fast_mirror_args.plain_job(arguments, told) is None:
            self.assertEqual((self.made, told.json, told.verbosity), ([], False, 0))
            return None
        return (*self.made[0], told.json, told.verbosity)

    def by_click(self, *arguments: str) -> tuple[Any, ...] | None:
        """What click makes of it; None: it has something to say."""
        self.made.clear()
        told = console()
        try:
            parse(arguments, told)
        except click.ClickException:
            return None
        return (*self.made[0], told.json, told.verbosity) if self.made else None

    def lines(self) -> Iterator[tuple[str, ...]]:
        """Yield command lines of all kinds, right ones and wrong ones."""
        options = (
            (),
            ("--json",),
            ("-q",),
            ("--quiet", "--json"),
            ("--delete",),
            ("--paranoid",),
            ("--durability", "none"),
            ("--durability=strict", "--durability", "none"),
            ("--durability", "some"),
            ("--connections", "64"),
            ("--connections", "65"),
            ("--connections=007",),
            ("--connections", "-1"),
            ("--connections", ""),
            ("--jobs", "2"),
            ("--jobs", "two"),
            ("--jobs", "²"),
            ("--from", "https://there/x"),
            ("--from=", "--delete"),
            ("--from=--delete",),
            ("--from",),
            ("--newest-only",),
            ("--allow-unsigned",),
            ("--keyring", "a.gpg", "--keyring=b.gpg"),
            ("--keyring", "a.gpg", "--allow-unsigned"),
            ("--component=main", "--component", "contrib", "--source", "--diffs"),
            ("--arch", "arm64", "--also", "main/i18n/*"),
            ("--arch", ""),
            ("--indexes", "zstd"),
            ("--indexes=some",),
            ("--suite", "stable"),
            ("--from-grid", "CAP"),
            ("--sample", "5"),
            ("--limit-rate", "1M"),
            ("--dry-run",),
            ("--to-grid",),
            ("-v",),
            ("-qv",),
            ("--", "more"),
            ("--help",),
            ("--nonsense",),
            ("-d", "somewhere"),
            ("--json=1",),
            ("more",),
            ("",),
        )
        commands = (
            ("list", "FILE", self.dest),
            ("rpm", self.dest),
            ("debian", "--suite", "sid", self.dest),
            ("debian", self.dest),
            ("verify", self.dest),
            ("verify", "nowhere"),
        )
        for command, option, url in product(commands, options, ((), URL)):
            yield ("mirror", *command, *url, *option)
            yield ("mirror", *option, *command, *url)
            yield (*option, "mirror", *command, *url)
            yield ("mirror", command[0], *option, *command[1:], *url)
            yield ("mirror", *command[:-1], *url, *option, command[-1])

    def test_the_same(self) -> None:
        """What is understood without click is what click makes of it."""
        understood = 0
        for line in self.lines():
            found = self.plainly(*line)
            if found is not None:
                understood += 1
                self.assertEqual(found, self.by_click(*line), line)
        self.assertGreater(understood, 180)

    def test_what_is_usual(self) -> None:
        """The lines of the manual do not wait for click."""
        line = ("mirror", "list", "FILE", "DEST", *URL, "--from", "http://there/", "--json")
        fetching = MirrorOptions(urls=("http://here/", "http://there/"))
        self.assertEqual(self.plainly(*line), ("FILE", "DEST", 1, fetching, True, 0))
        rpm = ("mirror", "rpm", "DEST", *URL, "--keyring", "a.gpg", "--newest-only")
        fetching = MirrorOptions(urls=("http://here/",))
        expected = ("DEST", RpmOptions(True, False, ("a.gpg",), False), fetching, None, False, 0)
        self.assertEqual(self.plainly(*rpm), expected)
        again = ("--json", "mirror", "verify", self.dest, "--paranoid")
        self.assertEqual(self.plainly(*again), (self.dest, True, 0.0, True, 0))

    def test_an_option_of_another_name(self) -> None:
        """Options of mirrors have the names that are declared, and no others."""
        self.assertRaises(TypeError, MirrorOptions, url="http://here/")
        self.assertNotEqual(MirrorOptions(), MirrorOptions(paranoid=True))

    def test_what_was_seen(self) -> None:
        """Who looks more closely is told what was found at a glance."""
        seen = QuickCheckResult(b"", 0, 0, [])
        fast_mirror_args.plain_job(("mirror", "verify", self.dest), console(), None, seen)
        self.assertEqual(self.made, [(self.dest, False, 0.0, seen)])

    def test_defaults(self) -> None:
        """What is not given is what click makes of nothing."""
        for name, (known, _) in fast_mirror_args.COMMANDS.items():
            command = COMMANDS[name.split()[1]]
            declared = {
                each.name: each.get_default(click.Context(command)) for each in command.params
            }
            for option in known:
                if option not in fast_mirror_args.COMMON and option.default != ():
                    self.assertEqual(declared[option.name], option.default, option.name)

    def test_one_declaration(self) -> None:
        """Click has each option that is read here, in the same spelling."""
        for name, (known, _) in fast_mirror_args.COMMANDS.items():
            command = COMMANDS[name.split()[1]]
            flags = {each.name: set(each.opts) for each in command.params}
            for option in known:
                self.assertEqual(flags[option.name], set(option.flags), f"{name} {option.name}")

    def test_completion(self) -> None:
        """A shell that asks what comes next is answered by click."""
        with patch.dict(os.environ, {fast_mirror_args.COMPLETION: "bash_complete"}):
            self.assertIsNone(self.plainly("mirror", "verify", self.dest))
