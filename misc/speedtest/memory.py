"""
How much memory do ``put`` and ``get`` of a huge file take, beyond that of a command that does nothing?

Each command runs as a process of its own on a fresh grid of ten storage directories; the figure is its peak
resident memory, as the kernel kept it. The file is a key stream, so that nothing can be saved on it, and what
comes back is compared with it by hash. At 3 of 10 it all needs about 5.4 times the file's size on disk.

    python -m misc.speedtest.memory [--megabytes N] [--directory DIR] [--limit-mib M] [--rtt-ms MS] [--json]

With ``--rtt-ms`` there are ten real servers instead, over TLS and a link of so long a round trip: their
windows are full, which they never are without.

The status is 1 if ``put`` or ``get`` took more than the limit above ``status``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import attrs

from misc.command import command, environment

LIMIT_MIB = 64
_CHUNK_BYTES = 1 << 20
_MAKER = """
import hashlib, os, sys
from pipegrid.core.stream_cipher import StreamCipher
cipher, digest, left = StreamCipher(os.urandom(16)), hashlib.sha256(), int(sys.argv[2])
zeros, stream = bytes(1 << 20), bytearray(1 << 20)
with open(sys.argv[1], "wb") as file:
    while left:
        cipher.apply(zeros, stream)
        piece = memoryview(stream)[:left]
        file.write(piece)
        digest.update(piece)
        left -= len(piece)
print(digest.hexdigest())
"""


class Failed(Exception):
    """A command failed, or gave other bytes; there is nothing to measure."""


@attrs.frozen
class Peaks:
    """
    Peak resident memory, in MiB.

    Attributes:
        ours: of this process, which a child inherits as the least that it can show.
    """

    status: float
    put: float
    get: float
    ours: float

    @property
    def above_idle(self) -> float:
        """What the hungrier transfer took beyond ``status``."""
        return max(self.put, self.get) - self.status


def measure(size: int, directory: str | None, rtt_s: float | None = None) -> Peaks:
    """
    Put and get a file of ``size`` bytes below a directory, which is left as it was.

    Args:
        rtt_s: of the link to real servers; None for storage directories without any.

    Raises:
        Failed: a command failed, or gave other bytes.
    """
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="pipegrid-memory-", dir=directory)
        )
        file, back = Path(scratch) / "file", Path(scratch) / "back"
        # Made elsewhere: a child's peak is never less than that of the process that started it.
        digest = _output([sys.executable, "-c", _MAKER, str(file), str(size)])
        if rtt_s is None:
            client = f"{scratch}/grid"
            _output(command(client, "-q", "init"))
        else:
            # What it imports is as much as a command that does nothing needs.
            from misc.speedtest.processes import Servers

            client = str(stack.enter_context(Servers(rtt_s=rtt_s, scratch=Path(scratch))).client)
        status, _ = _peak(command(client, "-q", "status"))
        put, cap = _peak(command(client, "put", str(file)))
        file.unlink()
        get, _ = _peak(command(client, "get", cap, "-o", str(back)))
        if _hash(back) != digest:
            raise Failed("get gave other bytes than were put")
    ours = _own_peak()
    if ours >= status:
        raise Failed(f"this process peaked at {ours:.1f} MiB, which hides what its children took")
    return Peaks(status, put, get, ours)


def _output(line: Sequence[str]) -> str:
    done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    return done.stdout.strip()


def _peak(line: Sequence[str]) -> tuple[float, str]:
    """Run a command; returns its peak resident memory in MiB, and what it printed."""
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    with process.stdout as stdout:
        text = stdout.read().strip()
    _, code, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise Failed(f"{' '.join(line)} gave {process.returncode}")
    return usage.ru_maxrss / 1024, text  # Linux counts in KiB


def _own_peak() -> float:
    """Return what this program itself peaked at; ``getrusage`` would count whoever started it."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise Failed("/proc/self/status does not tell our peak memory")


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--megabytes", type=int, default=400, help="size of the file [400]")
    parser.add_argument("--directory", help="where there is room [the usual one]")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help=f"[{LIMIT_MIB}]")
    parser.add_argument("--rtt-ms", type=float, help="of a link to real servers")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args(arguments)
    try:
        rtt_s = None if options.rtt_ms is None else options.rtt_ms / 1000
        peaks = measure(options.megabytes * 1_000_000, options.directory, rtt_s)
    except (Failed, OSError, subprocess.CalledProcessError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    if options.json:
        report = {"scenario": "memory", "megabytes": options.megabytes} | attrs.asdict(peaks)
        print(json.dumps(report | {"above_idle": peaks.above_idle}), file=out)
    else:
        print(f"peak resident memory, file of {options.megabytes} MB", file=out)
        print(f"  status {peaks.status:7.1f} MiB", file=out)
        for name, peak in (("put", peaks.put), ("get", peaks.get)):
            print(f"  {name:6} {peak:7.1f} MiB, {peak - peaks.status:+.1f}", file=out)
        print(f"  limit  {options.limit_mib:+7.1f} MiB; the bytes came back right", file=out)
    return 0 if peaks.above_idle <= options.limit_mib else 1


if __name__ == "__main__":
    sys.exit(main())
