"""
Does ``kill -9`` ever cost a share its wholeness, or a user a file that was said to be stored?

The real command runs as a process of its own and is killed at a random moment of ``put``; mostly not just
any moment, but one soon after something happened: the first file in ``incoming``, the first visible share,
the first cap on stdout. What must hold after every kill:

* whatever is visible under ``shares`` is, byte for byte, a share that the encoder makes of these files, in a
  whole container;
* each cap that was printed is right, its shares are on enough servers, and ``get`` brings the file back;
* the same command, run again, completes, prints the right caps, leaves no share missing and (unless another
  ``put`` took part) nothing in ``incoming``, and ``get`` brings every file back.

Sometimes the second run is killed too, and sometimes a second ``put`` of the same files runs beside the
one that is killed: that one must complete, or say in one sentence why it cannot.

The seed decides files, cases and delays; how far a process comes within a delay is the machine's business.

    python -m misc.soak.kill_put [--rounds N] [--seed S] [--durability batch|strict|none]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import attrs

from misc.command import command, environment
from pipegrid.core import base32, hashes
from pipegrid.core.caps import ChkCap
from pipegrid.core.placement import servers_of_happiness
from pipegrid.grid.client_config import GridConfig
from pipegrid.grid.client_creation import create_local
from pipegrid.storage import share_file
from pipegrid.transfer.offline_encoding import encode_file

SIZES = (200, 100_000, 3_000_000)
MOMENTS = ("any", "incoming", "visible", "printed")
MOMENT_WEIGHTS = (2, 4, 3, 2)
MEAN_DELAY_S = {"incoming": 0.02, "visible": 0.004, "printed": 0.003}
TIMEOUT_S = 120.0
_POLL_S = 0.0002


class Violation(Exception):
    """A promise was broken."""


@attrs.frozen
class Case:
    """
    What one round does.

    Attributes:
        durability: of the grid.
        sizes: of the files of the one ``put``.
        json: whether it is ``put --json``.
        moments: after which event each kill comes; one run for each.
        twin: a second ``put`` of the same files runs beside each of them.
    """

    durability: str
    sizes: tuple[int, ...]
    json: bool
    moments: tuple[str, ...]
    twin: bool


def random_case(rng: random.Random, durabilities: Sequence[str]) -> Case:
    """Return one of the cases, the telling ones more often."""
    several = rng.random() < 0.4
    return Case(
        durability=rng.choice(durabilities),
        sizes=tuple(rng.choice(SIZES) for _ in range(rng.randint(2, 6) if several else 1)),
        json=rng.random() < 0.25,
        moments=tuple(
            rng.choices(MOMENTS, MOMENT_WEIGHTS, k=2 if rng.random() < 0.2 else 1),
        ),
        twin=rng.random() < 0.2,
    )


@attrs.frozen
class StoredFile:
    """
    A file, and what a grid should hold of it.

    Attributes:
        share_hashes: SHA-256 of the data of each share.
    """

    path: Path
    content: bytes = attrs.field(repr=False)
    cap: ChkCap
    share_hashes: dict[int, bytes] = attrs.field(repr=False)


class Grid:
    """A fresh embedded grid with files to put on it."""

    def __init__(self, scratch: Path, case: Case, rng: random.Random) -> None:
        self.config: GridConfig = create_local(scratch / "grid", durability=case.durability)
        assert self.config.local is not None
        self._storage = self.config.local.directory
        self._scratch = scratch
        self.files = [self._make_file(n, size, rng) for n, size in enumerate(case.sizes)]
        self._by_index = {
            base32.encode(hashes.storage_index(file.cap.key)): file for file in self.files
        }

    def _make_file(self, number: int, size: int, rng: random.Random) -> StoredFile:
        path = self._scratch / f"file-{number}"
        path.write_bytes(content := rng.randbytes(size))
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            encoded = encode_file(str(path), directory, self.config.params, self.config.convergence)
            assert isinstance(encoded.cap, ChkCap)
            digests = {
                int(Path(name).name): hashlib.sha256(Path(name).read_bytes()).digest()
                for name in encoded.paths
            }
        return StoredFile(path, content, encoded.cap, digests)

    def entries(self, incoming: bool) -> Iterator[tuple[int, Path]]:
        """Yield server and path of each file below ``incoming``, or of each visible share."""
        for server in sorted(self._storage.glob("[0-9]*")):
            shares = server / "shares"
            top = shares / "incoming" if incoming else shares
            for directory, names, files in os.walk(top):
                if not incoming and directory == str(shares) and "incoming" in names:
                    names.remove("incoming")
                yield from ((int(server.name), Path(directory) / name) for name in files)

    def check_visible(self) -> dict[ChkCap, dict[int, set[int]]]:
        """
        Compare every visible share with what the encoder makes.

        Returns:
            for each file, which servers hold each of its shares.
        """
        found: dict[ChkCap, dict[int, set[int]]] = {file.cap: {} for file in self.files}
        for server, path in self.entries(incoming=False):
            file = self._by_index.get(path.parent.name)
            if file is None or not path.name.isdigit():
                raise Violation(f"{path} is visible, and no share of these files")
            number = int(path.name)
            if _share_hash(path) != file.share_hashes.get(number):
                raise Violation(f"{path} is visible, and not share {number}, whole and right")
            found[file.cap].setdefault(number, set()).add(server)
        return found

    def check_stored(self, files: Sequence[StoredFile]) -> None:
        """Check that files are on enough servers and come back."""
        visible = self.check_visible()
        for file in files:
            happiness = servers_of_happiness(visible[file.cap])
            if happiness < self.config.happy:
                raise Violation(f"{file.path} was stored, but its happiness is {happiness}")
            done = subprocess.run(
                command(self.config.directory, "get", str(file.cap)),
                capture_output=True,
                env=environment(),
                timeout=TIMEOUT_S,
            )
            if done.returncode or done.stdout != file.content:
                raise Violation(
                    f"{file.path} was stored, but get gave {done.returncode} and "
                    f"{len(done.stdout)} bytes: {done.stderr.decode('utf-8', 'replace')}"
                )

    def check_whole(self) -> None:
        """Check that every share of every file is there."""
        for cap, shares in self.check_visible().items():
            if len(shares) != cap.total_shares:
                raise Violation(f"after the rerun {sorted(shares)} are all shares of {cap}")

    def check_tidy(self) -> None:
        """Check that nothing is left half-done."""
        left = [str(path) for _, path in self.entries(incoming=True)]
        if left:
            raise Violation(f"after the rerun there are still {left}")


def _share_hash(path: Path) -> bytes | None:
    """Return the hash of the share data in a container, or None if it is no whole container."""
    data = path.read_bytes()
    try:
        header = share_file.parse_header(data[: share_file.HEADER_BYTES])
        end = share_file.leases_offset(header, len(data))
        leases = share_file.parse_leases(data[end:])
    except ValueError:
        return None
    if header.lease_count != 1 or any(lease.expires < time.time() for lease in leases):
        return None
    return hashlib.sha256(data[share_file.HEADER_BYTES : end]).digest()


class Put:
    """One running ``put``, with its output in a file, which outlives it."""

    def __init__(self, grid: Grid, as_json: bool, scratch: Path) -> None:
        options = ["--json"] if as_json else []
        self._json = as_json
        self._files = grid.files
        handle, name = tempfile.mkstemp(dir=scratch)
        self._stdout = Path(name)
        self._stderr = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115  (closed by finish)
        with os.fdopen(handle, "wb") as stdout:
            self.process = subprocess.Popen(
                command(
                    grid.config.directory,
                    "put",
                    *options,
                    *(str(file.path) for file in grid.files),
                ),
                stdout=stdout,
                stderr=self._stderr,
                env=environment(),
            )

    def has_printed(self) -> bool:
        """Return whether anything is on stdout."""
        return self._stdout.stat().st_size > 0

    def finish(self) -> tuple[int, str]:
        """Wait for it; returns its status and what it said."""
        try:
            status = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Violation(f"put hung for {TIMEOUT_S:g} s") from None
        with self._stderr as file:
            file.seek(0)
            return status, file.read().decode("utf-8", "replace")

    def acknowledged(self) -> list[StoredFile]:
        """Return the files whose caps were printed, all of which must be right and in order."""
        lines = self._stdout.read_text("utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # a torn line promises nothing
        objects = [json.loads(line) if self._json else {"cap": line.rstrip("\n")} for line in lines]
        caps = [fields["cap"] for fields in objects if "error" not in fields]
        waiting = iter(self._files)
        stored = [next((file for file in waiting if str(file.cap) == cap), None) for cap in caps]
        known = [file for file in stored if file is not None]
        if len(known) < len(caps):
            expected = [str(file.cap) for file in self._files]
            raise Violation(f"put printed {caps}; its files' caps are {expected}")
        return known


def play(case: Case, rng: random.Random, typical_s: float, counts: Counter[str]) -> None:
    """
    Do one round.

    Args:
        typical_s: how long a ``put`` takes here, from start to end.
        counts: what happened is added to it.

    Raises:
        Violation: a promise was broken.
    """
    with tempfile.TemporaryDirectory(prefix="pipegrid-kill-") as directory:
        scratch = Path(directory)
        grid = Grid(scratch, case, rng)
        for moment in case.moments:
            _kill_once(grid, case, moment, rng, typical_s, counts)
        rerun = Put(grid, case.json, scratch)
        status, prose = rerun.finish()
        if status or prose or rerun.acknowledged() != grid.files:
            raise Violation(f"the rerun gave {status}, and said {prose!r}")
        grid.check_whole()
        if not case.twin:  # which may have put shares elsewhere; the rest expires
            grid.check_tidy()
        grid.check_stored(grid.files)
        counts["reruns completed"] += 1


def _kill_once(
    grid: Grid,
    case: Case,
    moment: str,
    rng: random.Random,
    typical_s: float,
    counts: Counter[str],
) -> None:
    scratch = grid.files[0].path.parent
    twin = Put(grid, case.json, scratch) if case.twin else None
    put = Put(grid, case.json, scratch)
    happened: dict[str, Callable[[], bool]] = {
        "any": lambda: True,
        "incoming": lambda: any(True for _ in grid.entries(incoming=True)),
        "visible": lambda: any(True for _ in grid.entries(incoming=False)),
        "printed": put.has_printed,
    }
    while put.process.poll() is None and not happened[moment]():
        time.sleep(_POLL_S)
    mean_s = MEAN_DELAY_S.get(moment)
    time.sleep(rng.uniform(0, 1.05 * typical_s) if mean_s is None else rng.expovariate(1 / mean_s))
    put.process.kill()
    if twin is None:  # else the other one goes on changing things
        _count_state(grid, put, counts)
    status, prose = put.finish()
    if status == -9:
        counts["killed"] += 1
        counts[f"killed, {case.durability}"] += 1
    elif status == 0 or (status == 3 and twin is not None):
        counts["came too late to kill"] += 1
    else:
        raise Violation(f"put gave {status} before it was killed, and said {prose!r}")
    grid.check_stored(put.acknowledged())
    if twin is not None:
        _check_twin(grid, twin, counts)


def _check_twin(grid: Grid, twin: Put, counts: Counter[str]) -> None:
    status, prose = twin.finish()
    grid.check_stored(twin.acknowledged())
    if status == 0 and twin.acknowledged() == grid.files:
        counts["twins completed"] += 1
    elif status == 3 and prose.count("\n") == len(grid.files) - len(twin.acknowledged()):
        counts["twins refused, since another put had the shares"] += 1
    else:
        raise Violation(f"the twin of a killed put gave {status}, and said {prose!r}")


def _count_state(grid: Grid, put: Put, counts: Counter[str]) -> None:
    visible = sum(1 for _ in grid.entries(incoming=False))
    incoming = sum(1 for _ in grid.entries(incoming=True))
    shares = sum(file.cap.total_shares for file in grid.files)
    if put.has_printed():
        state = "after a cap was printed"
    elif visible == shares:
        state = "with all shares visible, no cap printed"
    elif visible:
        state = "with some shares visible"
    else:
        state = "with shares in incoming" if incoming else "before the first share"
    counts[f"  {state}"] += 1


def measure(durability: str, rng: random.Random) -> float:
    """Return how long a small ``put`` takes, in seconds; the first one warms up."""
    case = Case(durability, (SIZES[1],), False, (), False)
    elapsed_s = 0.0
    for _ in range(2):
        with tempfile.TemporaryDirectory(prefix="pipegrid-kill-") as directory:
            grid = Grid(Path(directory), case, rng)
            started = time.monotonic()
            Put(grid, False, Path(directory)).finish()
            elapsed_s = time.monotonic() - started
    return elapsed_s


def run(rounds: int, seed: int, durabilities: Sequence[str], out: TextIO) -> int:
    """Kill ``rounds`` times; returns 0 if no promise was broken."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    violations = 0
    print(f"kill_put: {rounds} kills, seed {seed}, {', '.join(durabilities)}", file=out)
    typical_s = measure(durabilities[0], rng)
    for number in range(10 * rounds):  # some come too late, but not nine in ten
        if counts["killed"] >= rounds or violations >= 10:
            break
        round_seed = rng.getrandbits(48)
        round_rng = random.Random(round_seed)
        case = random_case(round_rng, durabilities)
        try:
            play(case, round_rng, typical_s, counts)
        except Violation as violation:
            violations += 1
            print(f"round {number} (seed {round_seed}): {case}\n  {violation}", file=out)
    for name, count in sorted(counts.items()):
        print(f"{count:6d} {name}", file=out)
    print(f"{violations:6d} promises broken", file=out)
    return 1 if violations or counts["killed"] < rounds else 0


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--rounds", type=int, default=200, help="kills [200]")
    parser.add_argument("--seed", type=int, default=None, help="[a new one]")
    parser.add_argument(
        "--durability", action="append", choices=("batch", "strict", "none"), default=None
    )
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    return run(options.rounds, seed, options.durability or ("batch", "strict"), out)


if __name__ == "__main__":
    sys.exit(main())
