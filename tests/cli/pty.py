"""Programs on a terminal: a real pseudo-terminal, and an emulator that says what a person would see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pexpect
import pyte
from twisted.trial.unittest import SynchronousTestCase

SOURCE = Path(__file__).parent.parent.parent / "src"
TIMEOUT_S = 30
LINES = 60


class OnTerminal:
    """
    A program on a terminal of its own.

    Args:
        columns: how wide the terminal is.
    """

    def __init__(
        self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str], columns: int = 80
    ) -> None:
        self._screen = pyte.Screen(columns, LINES)
        self._stream = pyte.Stream(self._screen)
        self.raw = ""
        self.process: pexpect.spawn[str] = pexpect.spawn(
            argv[0],
            list(argv[1:]),
            cwd=str(cwd),
            env=dict(environment),
            dimensions=(LINES, columns),
            encoding="utf-8",
            codec_errors="replace",
        )
        self.process.delaybeforesend = None

    @property
    def lines(self) -> list[str]:
        """What stands on the screen, without the blanks at the ends."""
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        """The same, with lines that the terminal broke in one."""
        return "".join(
            line if len(line.rstrip()) == self._screen.columns else line.rstrip() + "\n"
            for line in self._screen.display
        ).rstrip("\n")

    def send(self, keys: str) -> None:
        """Type."""
        self.process.send(keys)

    def wait_until(self, seen: Callable[[OnTerminal], bool]) -> None:
        """Return when the screen is as wanted; AssertionError if it is not in time, or never will be."""
        deadline = time.monotonic() + TIMEOUT_S
        while not seen(self):
            if not self._read() or time.monotonic() > deadline:
                raise AssertionError("it never showed:\n" + "\n".join(self.lines))

    def wait_for(self, text: str) -> None:
        """Return when the text stands somewhere on the screen."""
        self.wait_until(lambda terminal: text in terminal.text)

    def finish(self) -> int:
        """Return the exit status when the program has ended."""
        while self._read():
            pass
        self.process.close()
        return -1 if self.process.exitstatus is None else self.process.exitstatus

    def _read(self) -> bool:
        """Show what has come; returns whether more may come."""
        try:
            data = self.process.read_nonblocking(65536, TIMEOUT_S)
        except (pexpect.EOF, pexpect.TIMEOUT):
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def close(self) -> None:
        """End the program, if it still runs."""
        self.process.close(force=True)


class TerminalTestCase(SynchronousTestCase):
    """A scratch home, in which ``pipegrid`` is a command."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        programs = self.home / "bin"
        programs.mkdir(parents=True)
        program = programs / "pipegrid"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pipegrid.cli "$@"\n')
        program.chmod(0o755)
        self.environment = {
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "LC_ALL": "C.UTF-8",
            "TERM": "linux",
            "INPUTRC": "/dev/null",
            "PS1": "$ ",
        }

    def on_terminal(self, *argv: str, columns: int = 80) -> OnTerminal:
        """Start a program in the scratch home."""
        terminal = OnTerminal(argv, self.home, self.environment, columns)
        self.addCleanup(terminal.close)
        return terminal
