"""
Does a power cut ever cost a file that a server had acknowledged?

Each round makes a fresh ext4 in an image, mounts it, and runs ``pipegrid serve`` on it. A client stores
files, many at a time, and notes which of them were acknowledged. At a random moment the file system is shut
down as a power cut would do it: everything that the journal has not yet committed is dropped, and nothing
reaches the disk any more (``EXT4_IOC_SHUTDOWN`` with ``NOLOGFLUSH``). The server is killed, the image mounted
again, which replays its journal, and a new server started on it, which sees another boot id, as after any
power cut (what a server notes of unfinished uploads is meant for one boot only). Then:

* every file that was acknowledged must come back, byte for byte: under ``batch`` and ``strict`` none may be
  lost;
* every file that was not acknowledged can be stored again, and comes back: neither a share that is visible
  without its bytes, nor what is left in ``incoming``, stands in the way of that.

``none`` promises nothing of that kind. It is played all the same, and *must* lose files: else the cut cuts
nothing, and the zeros of the others mean nothing.

What this cannot show: disks that say "written" of what is in their cache. The image is a file of this
machine.

Acknowledgements that arrive after the cut count like the others, since the server may have sent them before
it. Kernels before 6.13 let ``syncfs`` succeed on a file system that is shut down, which no power cut does;
there they are told apart, and not judged.

Needs root, for mounting.

    python -m misc.soak.crash [--rounds N] [--seed S] [--durability batch|strict|none]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from misc import ending
from misc.scratch import scratch_directory
from misc.soak.mounting import alone
from misc.speedtest.oneserver import one_server
from pipegrid import Grid
from pipegrid.core.caps import Cap
from pipegrid.disk.durability import load_syncfs
from pipegrid.errors import CorruptionError, PipegridError

POLICIES = ("none", "batch", "strict")
PROMISING = ("batch", "strict")
IMAGE_BYTES = 1 << 30
"""Sparse; more than a round can fill."""
PROGRAMS = ("mkfs.ext4", "mount", "umount", "unshare")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REBOOTED = ("unshare", "--mount", "sh", "-c", f'mount --bind "$0" {BOOT_ID} && exec "$@"')
"""With a file's name behind it, it runs a command that reads the boot id from there."""
SIZES = (200, 20_000, 1_000_000, 8_000_000)
SIZE_WEIGHTS = (60, 25, 13, 2)
EARLIEST_S, LATEST_S = 0.05, 2.0
READING_AT_ONCE = 8

_EXT4_IOC_SHUTDOWN = 0x8004587D
"""``_IOR('X', 125, __u32)``, of Linux' ``fs/ext4/ext4.h``."""
_NOLOGFLUSH = 2


class Unable(Exception):
    """It cannot be tried here; says why."""


class Image:
    """An ext4 in a file, mounted while this is entered; can be cut off."""

    def __init__(self, scratch: Path) -> None:
        self._file = scratch / "disk.img"
        self.root = scratch / "disk"
        self.root.mkdir()
        self._mounted = False

    def __enter__(self) -> Image:
        return self

    def __exit__(self, *_error: object) -> None:
        self.unmount()

    def make(self, commit_s: int) -> None:
        """Make a new file system and mount it, with so many seconds between commits of the journal."""
        self.unmount()
        self._file.unlink(missing_ok=True)
        self._file.touch()
        os.truncate(self._file, IMAGE_BYTES)
        _call("mkfs.ext4", "-q", "-F", str(self._file))
        self._mount(commit_s)

    def cut(self) -> bool:
        """Let nothing more reach the disk; returns whether ``syncfs`` says so from now on."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
            syncfs = load_syncfs()
            if syncfs is None:  # every share gets its own fsync, which always says so
                return True
            try:
                syncfs(fd)
            except OSError:
                return True
            return False
        finally:
            os.close(fd)

    def mount_again(self) -> None:
        """Mount what the cut has left; the journal is replayed."""
        self.unmount()
        self._mount(5)

    def _mount(self, commit_s: int) -> None:
        _call("mount", "-o", f"loop,commit={commit_s}", str(self._file), str(self.root))
        self._mounted = True

    def unmount(self) -> None:
        """Unmount it, if it is mounted."""
        if self._mounted:
            _call("umount", str(self.root))
            self._mounted = False


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Unable(f"{' '.join(command)} failed: {done.stderr.strip()}")


def check_able() -> None:
    """Raise Unable if there is no hope of mounting an image."""
    if os.geteuid():
        raise Unable("the crash test mounts a file system of its own; run it as root")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise Unable(f"the crash test needs {' and '.join(missing)}; install e2fsprogs and mount")


@contextlib.contextmanager
def workplace(scratch: Path | None) -> Iterator[Path]:
    """
    Make a directory for images, where nobody else mounts anything meanwhile.

    Raises:
        Unable: there is no hope of mounting one.
    """
    check_able()
    with contextlib.ExitStack() as stack:
        name = tempfile.mkdtemp(prefix="pipegrid-crash-", dir=scratch)
        stack.callback(shutil.rmtree, name, ignore_errors=True)
        stack.enter_context(alone())
        yield Path(name)


@attrs.frozen
class Case:
    """
    What one round does.

    Attributes:
        at_once: files that are on their way at any time.
        commit_s: between commits of the journal, if nobody asks for one.
        delay_s: from the first acknowledgement to the cut.
    """

    durability: str
    at_once: int
    commit_s: int
    delay_s: float
    seed: int

    def content(self, number: int) -> bytes:
        """Return the bytes of the file of that number."""
        rng = random.Random(f"{self.seed}-{number}")
        [size] = rng.choices(SIZES, SIZE_WEIGHTS)
        return rng.randbytes(size)


def random_case(rng: random.Random, durability: str) -> Case:
    """Return one of the cases."""
    return Case(
        durability,
        at_once=rng.choice((1, 8, 32, 64)),
        commit_s=rng.choice((1, 5)),
        delay_s=rng.uniform(EARLIEST_S, LATEST_S),
        seed=rng.getrandbits(48),
    )


@attrs.define
class Outcome:
    """
    What became of the files of a round, or of many.

    Attributes:
        stored, stored_late: acknowledged before the cut; after it.
        lost, lost_late: of these, those that did not come back as they were.
        unacknowledged: begun, and not acknowledged.
        stuck: of these, those that could not be stored again, or did not come back then.
        reasons: a sentence for each that was lost or stuck.
    """

    stored: int = 0
    stored_late: int = 0
    lost: int = 0
    lost_late: int = 0
    unacknowledged: int = 0
    stuck: int = 0
    reasons: tuple[str, ...] = ()

    def __add__(self, other: Outcome) -> Outcome:
        both = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Outcome(*(mine + theirs for mine, theirs in both))


class Writer:
    """Stores file after file until told to stop, and notes what was acknowledged."""

    def __init__(self, grid: Grid, case: Case) -> None:
        self._grid = grid
        self._case = case
        self.begun = 0
        self.stored: dict[int, Cap] = {}
        self.stopped = False
        self.first: Deferred[None] = Deferred()
        self._lanes = [Deferred.fromCoroutine(self._store()) for _ in range(case.at_once)]

    async def _store(self) -> None:
        while not self.stopped:
            number = self.begun
            self.begun += 1
            try:
                result = await self._grid.put(self._case.content(number))
            except PipegridError:
                if self._has_stopped():
                    return
                raise
            self.stored[number] = result.cap
            if not self.first.called:
                self.first.callback(None)

    def _has_stopped(self) -> bool:
        return self.stopped

    def stop(self) -> Deferred[Any]:
        """Begin no more files; fires when all that were begun are stored or have failed."""
        self.stopped = True
        return gatherResults(self._lanes, consumeErrors=True)


async def play(reactor: Any, image: Image, directory: Path, case: Case, same_boot: bool) -> Outcome:
    """Do one round; with ``same_boot`` only the disk was gone for a while, and the machine was not."""
    image.make(case.commit_s)
    storage = image.root / "storage"
    with one_server(directory, storage, case.durability) as (client, process):
        grid = await Grid.open(reactor, client)
        try:
            writer = Writer(grid, case)
            await writer.first
            await deferLater(reactor, case.delay_s)
            in_time = set(writer.stored)
            tells = image.cut()
            await writer.stop()
        finally:
            await grid.close()
        process.kill()
    image.mount_again()
    boot_id = directory / "boot_id"
    boot_id.write_text(f"{uuid.UUID(int=random.Random(case.seed).getrandbits(128))}\n")
    rebooted = () if same_boot else (*_REBOOTED, str(boot_id))
    with one_server(directory, storage, case.durability, rebooted) as (client, _):
        grid = await Grid.open(reactor, client)
        try:
            outcome = await inspect(grid, case, writer.begun, writer.stored, in_time, tells)
        finally:
            await grid.close()
    image.unmount()
    return outcome


async def inspect(
    grid: Grid, case: Case, begun: int, stored: dict[int, Cap], in_time: set[int], tells: bool
) -> Outcome:
    """
    Find out what is left.

    Args:
        begun: files 0 to this were.
        stored: the caps of those that were acknowledged.
        in_time: those of them that were so before the cut.
        tells: whether what was acknowledged later is to be judged.
    """
    outcome = Outcome()
    numbers = iter(range(begun))

    async def look() -> None:
        for number in numbers:
            content = case.content(number)
            cap = stored.get(number)
            try:
                await come_back(grid, cap, content)
                failed = False
            except PipegridError as error:
                failed = True
                outcome.reasons += (f"file {number}, {len(content)} bytes: {error}",)
            if cap is None:
                outcome.unacknowledged += 1
                outcome.stuck += failed
            elif number in in_time or tells:
                outcome.stored += 1
                outcome.lost += failed
            else:
                outcome.stored_late += 1
                outcome.lost_late += failed

    await gatherResults([Deferred.fromCoroutine(look()) for _ in range(READING_AT_ONCE)])
    return outcome


async def come_back(grid: Grid, cap: Cap | None, content: bytes) -> None:
    """
    Fetch a file, which is stored first if there is no cap of it yet.

    Raises:
        PipegridError: it did not come back as it was.
    """
    if cap is None:
        cap = (await grid.put(content)).cap
    if await grid.read(cap) != content:
        raise CorruptionError("other bytes came back")


def verdict(totals: dict[str, Outcome]) -> list[str]:
    """Return what is wrong: a sentence for each policy that broke its promise, or proves nothing."""
    wrong = []
    for policy, outcome in totals.items():
        if policy in PROMISING:
            if outcome.lost:
                wrong.append(f"{policy}: {outcome.lost} acknowledged files were lost")
            if outcome.stuck:
                wrong.append(f"{policy}: {outcome.stuck} files could not be stored again")
            if not outcome.stored:
                wrong.append(f"{policy}: nothing was acknowledged, so nothing is proved")
        elif not outcome.lost:
            wrong.append(f"{policy}: nothing was lost, so this test cannot tell loss")
    return wrong


async def run(
    reactor: Any, image: Image, scratch: Path, options: argparse.Namespace, out: TextIO
) -> int:
    """Play all rounds, the policies in turns; returns the exit status."""
    policies = list(dict.fromkeys(options.durability or POLICIES))
    rng = random.Random(options.seed)
    totals = {policy: Outcome() for policy in policies}
    print(f"crash: {options.rounds} rounds each, seed {options.seed}", file=out)
    for number in range(options.rounds):
        for policy in policies:
            case = random_case(rng, policy)
            directory = scratch / f"{policy}-{number}"
            outcome = await play(reactor, image, directory, case, options.same_boot)
            totals[policy] += outcome
            if options.verbose or (policy in PROMISING and (outcome.lost or outcome.stuck)):
                print(f"round {number}: {case}\n  {outcome}", file=out, flush=True)
    print(table(totals), file=out)
    wrong = verdict(totals)
    for sentence in wrong:
        print(sentence, file=out)
    return 1 if wrong else 0


def table(totals: dict[str, Outcome]) -> str:
    """Return what happened, as Markdown."""
    lines = [
        "| policy | acknowledged | of these lost | not acknowledged | of these not storable again |",
        "|---|---|---|---|---|",
    ]
    for policy, outcome in totals.items():
        numbers = (outcome.stored, outcome.lost, outcome.unacknowledged, outcome.stuck)
        lines.append(f"| {policy} | {' | '.join(map(str, numbers))} |")
        if outcome.stored_late:
            lines.append(
                f"| {policy}, after the cut (not judged) |"
                f" {outcome.stored_late} | {outcome.lost_late} | | |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: exit status 0 if all promises held, 1 if not, 2 if it cannot be tried."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--rounds", type=int, default=20, help="cuts for each policy [20]")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--durability", action="append", choices=POLICIES, default=None)
    parser.add_argument("--scratch", type=scratch_directory, help="where the image is made")
    parser.add_argument(
        "--same-boot", action="store_true", help="only the disk was gone, not the machine"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each round")
    options = parser.parse_args(arguments)
    ending.end_on_sigterm()
    status = 2
    try:
        with workplace(options.scratch) as place, Image(place) as image:

            async def campaign(reactor: Any) -> None:
                nonlocal status
                try:
                    status = await run(reactor, image, place, options, sys.stdout)
                except Unable as error:
                    print(error, file=sys.stderr)

            ending.run(campaign)
    except Unable as error:
        print(error, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
