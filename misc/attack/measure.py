"""
One attack on one server: its memory, and an honest client's times, before, during and after.

The attacker is a process that stands back where it and the server want a processor (``nice``): in the world
it has its own. The honest client is this process, and comes from the same address as the attacker does, which
is the harder case for a server that limits connections by address.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from misc.attack import Attack
from misc.attack.honest import Client, Times
from misc.attack.target import make_target
from misc.command import environment
from misc.speedtest.processes import ROOT, first_line, peak_bytes, running

MAX_MORE_BYTES = 256 << 20
"""Resident, above idle, at any moment of an attack."""
MAX_TIMES_SLOWER = 2.0
"""An honest client's median, compared with undisturbed."""
MAX_WORST_S = 1.0
MAX_LEFT_BYTES = 64 << 20
"""Above idle, when the attacker has gone: the allocator keeps some of what it has had."""
MAX_LEFT_THREADS = 8
"""More than before: workers, which are bounded, are started when they are first needed."""
SETTLE_S = 20.0
"""So long may the server take to be as it was before; most of it is the patience of TLS with a last word."""
END_S = 15.0


@attrs.frozen(kw_only=True)
class State:
    """
    What a server has at one moment.

    Attributes:
        resident_bytes: memory.
        sockets, files, threads: how many; files are those that are open.
        incoming: files of shares that are not complete.
    """

    resident_bytes: int
    sockets: int
    files: int
    threads: int
    incoming: int


@attrs.frozen(kw_only=True)
class Outcome:
    """
    What an attack did.

    Attributes:
        idle, after: the server before, and some seconds after the attacker was gone.
        peak_bytes: the most memory that was resident during the attack.
        undisturbed, disturbed: what an honest client met before and during it.
        alive: whether the server's process still was there.
        said: what the attack program complained of, if it failed.
    """

    attack: Attack
    idle: State
    after: State
    peak_bytes: int
    undisturbed: Times
    disturbed: Times
    alive: bool = True
    said: str = ""

    @property
    def more_bytes(self) -> int:
        """Of memory, at the peak."""
        return self.peak_bytes - self.idle.resident_bytes

    @property
    def times_slower(self) -> float:
        """How much longer an honest client waited."""
        return self.disturbed.median_s / self.undisturbed.median_s

    def broken(self, timed: bool = True) -> list[str]:
        """
        Return what did not hold, one sentence each.

        Args:
            timed: whether times count; they mean nothing on a machine that does other things as well.
        """
        found = [
            (not self.alive, "the server's process ended"),
            (bool(self.said), f"the attack program failed: {self.said}"),
            (
                self.more_bytes > MAX_MORE_BYTES,
                f"the server took {_mib(self.more_bytes)} more memory, "
                f"and may take {_mib(MAX_MORE_BYTES)}",
            ),
            *self.left(),
        ]
        slow = [
            (bool(self.disturbed.failures), self._refused()),
            (
                self.times_slower > MAX_TIMES_SLOWER,
                f"an honest client took {self.times_slower:.1f} times as long",
            ),
            (
                self.disturbed.worst_s > MAX_WORST_S,
                f"an honest client once took {self.disturbed.worst_s:.2f} s",
            ),
        ]
        return [sentence for wrong, sentence in found + (slow if timed else []) if wrong]

    def as_json(self, timed: bool = True) -> dict[str, Any]:
        """Return one line's object."""
        return {
            "attack": self.attack.name,
            "who": self.attack.who,
            "idle_mib": self.idle.resident_bytes >> 20,
            "peak_mib": self.peak_bytes >> 20,
            "left_mib": (self.after.resident_bytes - self.idle.resident_bytes) >> 20,
            "tries": len(self.disturbed.seconds) + len(self.disturbed.failures),
            "failed_tries": len(self.disturbed.failures),
            "undisturbed_median_ms": _ms(self.undisturbed.median_s),
            "median_ms": _ms(self.disturbed.median_s),
            "undisturbed_worst_ms": _ms(self.undisturbed.worst_s),
            "worst_ms": _ms(self.disturbed.worst_s),
            "left_sockets": self.after.sockets - self.idle.sockets,
            "left_threads": self.after.threads - self.idle.threads,
            "left_incoming": self.after.incoming,
            "broken": self.broken(timed),
        }

    def left(self) -> list[tuple[bool, str]]:
        """Return what should not have stayed, and whether it has."""
        idle, after = self.idle, self.after
        more_bytes = after.resident_bytes - idle.resident_bytes
        threads = after.threads - idle.threads
        return [
            (more_bytes > MAX_LEFT_BYTES, f"{_mib(more_bytes)} of memory stayed with the server"),
            (
                after.sockets > idle.sockets,
                f"{after.sockets - idle.sockets} connections stayed open",
            ),
            (threads > MAX_LEFT_THREADS, f"{threads} threads stayed"),
            (
                after.incoming > self.attack.may_leave_files,
                f"{after.incoming} unfinished shares stayed",
            ),
        ]

    def _refused(self) -> str:
        failures = self.disturbed.failures
        tries = len(failures) + len(self.disturbed.seconds)
        return f"an honest client was refused {len(failures)} of {tries} times ({(failures or [''])[0]})"


def run(attack: Attack, seconds: float, scratch: Path, rng: random.Random) -> Outcome:
    """
    Start a server, attack it for so long, and return what happened.

    Args:
        scratch: an empty directory, for the server.
    """
    directory = scratch / "node"
    with running(serve_command(directory, attack.serve)) as process:
        addresses = first_line(process), first_line(process)
        client = Client(make_target(*addresses, directory, 0.0), rng)
        client.run(0.5)  # what is loaded with the first request is no one's attack
        undisturbed = client.run(min(3.0, seconds))
        idle = settled(process.pid, directory, lambda _: True)
        reset_peak(process.pid)
        said, disturbed = attacked(attack, addresses, directory, seconds, client)
        alive = process.poll() is None
        peak = peak_bytes(process.pid) if alive else 0
        nothing = State(resident_bytes=0, sockets=0, files=0, threads=0, incoming=0)

        def as_before(state: State) -> bool:
            now = Outcome(
                attack=attack,
                idle=idle,
                after=state,
                peak_bytes=0,
                undisturbed=undisturbed,
                disturbed=undisturbed,
            )
            return not now.broken(timed=False)

        after = settled(process.pid, directory, as_before) if alive else nothing
        if alive:  # a machine that became slower meanwhile is no one's attack either
            again = client.run(min(3.0, seconds))
            undisturbed.seconds += again.seconds
            undisturbed.failures += again.failures
        return Outcome(
            attack=attack,
            idle=idle,
            after=after,
            peak_bytes=peak,
            undisturbed=undisturbed,
            disturbed=disturbed,
            alive=alive,
            said=said,
        )


def attacked(
    attack: Attack,
    addresses: tuple[str, str],
    directory: Path,
    seconds: float,
    client: Client,
) -> tuple[str, Times]:
    """Return what the attack program complained of, and what an honest client met in the meantime."""
    nurl, furl = addresses
    options = ["--furl", furl, "--nurl", nurl, "--directory", str(directory)]
    program = [sys.executable, "-m", f"misc.attack.{attack.module}", *options]
    surroundings = environment()
    surroundings["PYTHONPATH"] += os.pathsep + str(ROOT)
    with subprocess.Popen(
        ["nice", "-n", "19", *program, "--seconds", str(seconds)],
        env=surroundings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # what it has started ends with it
    ) as attacker:
        try:
            disturbed = client.run(seconds)
            with contextlib.suppress(subprocess.TimeoutExpired):
                attacker.wait(END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(attacker.pid, signal.SIGKILL)
        assert attacker.stderr is not None
        said = attacker.stderr.read().decode("utf-8", "replace").strip()
    failed = attacker.returncode not in (0, -signal.SIGKILL)
    return (said.splitlines() or ["no word"])[-1] if failed else "", disturbed


def settled(pid: int, directory: Path, enough: Callable[[State], bool]) -> State:
    """Return a server's state as soon as it is enough, or the time for that is over."""
    ends = time.monotonic() + SETTLE_S
    while True:
        state = look(pid, directory)
        if enough(state) or time.monotonic() > ends:
            return state
        time.sleep(0.25)


def look(pid: int, directory: Path) -> State:
    """Return what a server's process has now."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    opened = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.append(os.readlink(entry))
    sockets = sum(name.startswith("socket:") for name in opened)
    incoming = directory / "storage" / "shares" / "incoming"
    return State(
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        sockets=sockets,
        files=len(opened) - sockets,
        threads=int(status["Threads"]),
        incoming=sum(len(files) for _, _, files in os.walk(incoming)),
    )


def reset_peak(pid: int) -> None:
    """Have the kernel count the peak of a process's memory from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def serve_command(directory: Path, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command line of the server, which ends with its standard input."""
    program = [sys.executable, "-m", "pipegrid.speedtest.end_with_parent", "pipegrid.cli"]
    listen = ("--port", "tcp:0:interface=127.0.0.1")
    return [*program, "-q", "-d", str(directory), "serve", *listen, *options]


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _ms(seconds: float) -> float | None:
    """Return milliseconds, or None where there is no such time: JSON knows nothing infinite."""
    return None if seconds == float("inf") else round(seconds * 1000, 1)
