"""Commands run as users run them: each in a process, with a home of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from twisted.trial.unittest import SynchronousTestCase

import pipegrid
from tests.forked import client

TIMEOUT_S = 120

C = TypeVar("C", bound=Callable[..., Any])


def in_fresh_processes(test: C) -> C:
    """Have all commands of a test begin with an interpreter of their own, as users' do."""
    vars(test)["in_fresh_processes"] = True
    return test


class ProcessTestCase(SynchronousTestCase):
    """A home, and commands in it; those that are run to their end are forked (``tests.forked``)."""

    def setUp(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(subprocess.run, ["rm", "-rf", str(self.home)], check=False)
        self.environment = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(pipegrid.__file__).parent.parent),
            "LC_ALL": "C.UTF-8",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in a fresh process."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run_command(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Run one to its end; returns what it printed."""
        test = getattr(self, self._testMethodName)
        run = self._run_fresh if hasattr(test, "in_fresh_processes") else self._run_forked
        found, out, err = run(*arguments)
        self.assertEqual(found, status, err)
        self.assertNotIn("Traceback", err)
        return out.strip(), err

    def _run_fresh(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err

    def _run_forked(self, *arguments: str) -> tuple[int, str, str]:
        done = client.run(
            "pipegrid.cli", *arguments, cwd=self.home, env=self.environment, timeout=TIMEOUT_S
        )
        return done.returncode, _text(done.stdout), _text(done.stderr)


def _text(data: bytes) -> str:
    """Return what ``subprocess`` makes of bytes if it is told that they are text."""
    return io.TextIOWrapper(io.BytesIO(data)).read()
