"""
The two that are compared, each by its command as users type it, every time as a process of its own.

PipeGrid's command starts, connects to ten servers and ends. Tahoe-LAFS's asks its gateway, which runs all
the time and is connected; its processor time counts, too.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from misc.command import command, environment
from misc.speedtest.peers.nodes import TAHOE, Gateway
from misc.speedtest.processes import cpu_s

PATIENCE_S = 3600.0


@attrs.frozen
class Took:
    """
    One command that ran.

    Attributes:
        cpu_s: of the command, and of the gateway that it asks.
        others_cpu_s: of servers and the link.
        said: on standard output.
    """

    seconds: float
    cpu_s: float
    others_cpu_s: float
    said: str


class CommandFailed(Exception):
    """A command ended with a status that it should not have."""


class Side(Protocol):
    """What stores and fetches trees."""

    name: str

    def backup(self, tree: Path, name: str) -> Took:
        """Store a tree that may be known."""

    def restore(self, name: str, target: Path) -> Took:
        """Fetch what was stored so last, as PipeGrid reads it."""

    def put(self, tree: Path) -> Took:
        """Store a tree."""

    def get(self, cap: str, target: Path) -> Took:
        """Fetch a tree."""

    def check(self, cap: str, add_lease: bool = False, repair: bool = False) -> Took:
        """Look after a tree."""


class Runner:
    """
    Runs commands, and says what they took.

    Args:
        others: processor time of servers and link so far.
        gateway: that of the gateway, if there is one.
    """

    def __init__(
        self, others: Callable[[], float], gateway: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._others = others
        self._gateway = gateway

    def run(self, line: Sequence[str], good: Sequence[int] = (0,)) -> Took:
        """
        Run one.

        Raises:
            CommandFailed: its status is not among the good ones.
        """
        others_s, own_s = self._others(), _children_s() + self._gateway()
        began = time.perf_counter()
        done = subprocess.run(
            line,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        seconds = time.perf_counter() - began
        if done.returncode not in good:
            said = (done.stdout + done.stderr)[-2000:]
            raise CommandFailed(f"{' '.join(line)} ended with status {done.returncode}: {said}")
        own_s = _children_s() + self._gateway() - own_s
        return Took(seconds, own_s, self._others() - others_s, done.stdout.strip())


class Pipegrid:
    """``pipegrid``, with a client's directory."""

    name = "pipegrid"

    def __init__(self, directory: Path, runner: Runner) -> None:
        self._directory = directory
        self._runner = runner

    def _run(self, *arguments: str, good: Sequence[int] = (0,)) -> Took:
        return self._runner.run(command(self._directory, "-q", *arguments), good)

    def forget(self) -> None:
        """Know of no backup any more, as servers do not: its list was on them."""
        shutil.rmtree(self._directory / "private" / "backup", ignore_errors=True)

    def backup(self, tree: Path, name: str) -> Took:
        """Store a tree that may be known."""
        return self._run("backup", str(tree), "--as", name)

    def restore(self, name: str, target: Path) -> Took:
        """Fetch the newest run."""
        return self._run("restore", "--as", name, "-o", str(target))

    def put(self, tree: Path) -> Took:
        """Store a tree."""
        return self._run("put", "-r", str(tree))

    def get(self, cap: str, target: Path) -> Took:
        """Fetch a tree."""
        return self._run("get", "-r", cap, "-o", str(target))

    def check(self, cap: str, add_lease: bool = False, repair: bool = False) -> Took:
        """Look after a tree."""
        options = ["--add-lease"] * add_lease + ["--repair"] * repair
        return self._run("check", "-r", *options, cap)

    def repair(self, cap: str) -> Took:
        """Fetch and check every byte of a tree, and make again what is missing."""
        return self._run("repair", "-r", cap)

    def list(self, cap: str) -> Took:
        """List a directory."""
        return self._run("ls", cap)

    def put_file(self, path: Path) -> str:
        """Store a file; returns its cap."""
        return self._run("put", str(path)).said

    def cat(self, cap: str, target: Path) -> Took:
        """Fetch the bytes of a file."""
        return self._run("get", cap, "-o", str(target))


class Tahoe:
    """
    ``tahoe``, with its gateway.

    Args:
        reader: fetches what was stored, to be compared.
    """

    name = "tahoe"

    def __init__(self, gateway: Gateway, runner: Runner, reader: Pipegrid) -> None:
        self._gateway = gateway
        self._runner = runner
        self._reader = reader
        self._homes: dict[str, str] = {}

    def _run(self, *arguments: str) -> Took:
        return self._runner.run([TAHOE, "-d", str(self._gateway.directory), *arguments])

    def backup(self, tree: Path, name: str) -> Took:
        """Store a tree that may be known, below a directory that is made before."""
        if name not in self._homes:
            self._homes[name] = self._run("mkdir").said
        return self._run("backup", str(tree), f"{self._homes[name]}/here")

    def restore(self, name: str, target: Path) -> Took:
        """Fetch the newest run."""
        return self._reader.get(f"{self._homes[name]}/here/Latest", target)

    def put(self, tree: Path) -> Took:
        """Store a tree below a directory that is made before."""
        home = self._run("mkdir").said
        took = self._run("cp", "-r", str(tree), f"{home}/")
        return attrs.evolve(took, said=f"{home}/{tree.name}")

    def get(self, cap: str, target: Path) -> Took:
        """Fetch a tree."""
        target.mkdir()
        return self._run("cp", "-r", cap, str(target))

    def check(self, cap: str, add_lease: bool = False, repair: bool = False) -> Took:
        """Look after a tree."""
        options = ["--add-lease"] * add_lease + ["--repair"] * repair
        return self._run("deep-check", *options, cap)


def gateway_cpu(gateway: Gateway) -> Callable[[], float]:
    """Return what tells the processor time of a gateway that runs."""
    return lambda: cpu_s(gateway.pid)


def _children_s() -> float:
    """Return the processor time of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
