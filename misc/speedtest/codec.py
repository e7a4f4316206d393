"""
How fast is the codec, and how fast could it be?

Measures SHA-256, AES and zfec alone and the encoder as a whole, on one thread and on two, in one
process. Every round takes each of them in turn, on fresh random data, so that whatever else the
machine does meets all of them alike. Beside the encoder stands its bound: the time that
the bare primitives of the same run need for the same bytes. Nothing here touches a network or a reactor.

    python misc/speedtest/codec.py [--megabytes N] [--rounds R] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import attrs
import zfec

from pipegrid.core import erasure
from pipegrid.core.encoder import Encoder, ShareWrite, convergent_key
from pipegrid.core.encoding_parameters import DEFAULT_SEGMENT_BYTES, Geometry, Params
from pipegrid.core.stream_cipher import StreamCipher
from pipegrid.errors import PipegridError

VECTORS = Path(__file__).resolve().parents[2] / "tests" / "vectors" / "immutable.json"
VECTOR = "default-5MiB-17"

PARAMS = Params()

ZFEC_PIECE_BYTES = (4096, 16384, 32768, 65536, 131072, 0)
"""Sizes to try zfec with; 0 is the whole block."""

IN_FLIGHT_SEGMENTS = 4
"""Segments whose writes are still held while the next are coded, as during an upload."""

NAMES = {
    "sha256": "SHA-256",
    "sha256_2": "SHA-256, two threads",
    "aes": "AES-128-CTR",
    "encode_1": "encoder, one thread, with key pass",
    "encode_2": "encoder, two threads, with key pass",
    "decode_parity": "erasure decoding, no primary block",
}


@attrs.frozen
class Figure:
    """One measured thing: megabytes (10^6 plaintext bytes) a second, one value a round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.rounds)

    def report(self) -> dict[str, float]:
        """Return the JSON form."""
        return {
            "median": round(self.median, 1),
            "low": round(min(self.rounds), 1),
            "high": round(max(self.rounds), 1),
        }


@attrs.frozen
class Result:
    """All figures of a run, and what follows from them."""

    params: Params
    megabytes: int
    figures: dict[str, Figure]
    faults: dict[str, float]
    """Page faults a megabyte: where there are many, the allocator spoils the figure."""

    @property
    def best_coder(self) -> str:
        """The name of the quickest way to code: zfec in one of its ways, or ISA-L if it is here."""
        names = [name for name in self.figures if name.startswith(("zfec", "isal"))]
        return max(names, key=lambda name: self.figures[name].median)

    @property
    def bound(self) -> float:
        """
        Megabytes a second that one thread could encode if nothing but the primitives took time.

        SHA-256 sees each plaintext byte for the key, for the flat hash and for the segment hash,
        and n / k times as block: 6.33 bytes at 3 of 10.
        """
        hashed = 3 + self.params.total_shares / self.params.required_shares
        return 1 / (
            hashed / self.figures["sha256"].median
            + 1 / self.figures["aes"].median
            + 1 / self.figures[self.best_coder].median
        )

    def report(self) -> dict[str, Any]:
        """Return the JSON form, one object."""
        one, two = self.figures["encode_1"].median, self.figures["encode_2"].median
        return {
            "scenario": "codec",
            "required_shares": self.params.required_shares,
            "total_shares": self.params.total_shares,
            "megabytes": self.megabytes,
            "python": platform.python_version(),
            "erasure": erasure.library(),
            "cores": os.cpu_count(),
            "unit": "MB/s of plaintext",
            "figures": {name: figure.report() for name, figure in self.figures.items()},
            "page_faults_per_megabyte": {k: round(v, 1) for k, v in self.faults.items()},
            "coder_best": self.best_coder,
            "bound_one_thread": round(self.bound, 1),
            "percent_of_bound": round(100 * one / self.bound, 1),
            "two_threads_over_one": round(two / one, 2),
        }


def encode_one_thread(
    geometry: Geometry, convergence: bytes, segments: list[memoryview]
) -> Iterator[ShareWrite]:
    """Yield every write of a file, as one thread makes them; the key pass comes first."""
    encoder = Encoder(geometry, convergent_key(convergence, geometry, segments))
    for segment in segments:
        yield from encoder.add(encoder.code(encoder.encrypt(segment)))
    yield from encoder.finish()


def encode_two_threads(
    geometry: Geometry, convergence: bytes, segments: list[memoryview], pool: ThreadPoolExecutor
) -> Iterator[ShareWrite]:
    """Yield every write of a file: encrypted in order, coded by two threads at a time."""
    encoder = Encoder(geometry, convergent_key(convergence, geometry, segments))
    in_order = threading.Lock()
    plaintext = iter(segments)

    def work() -> list[ShareWrite]:
        # Workers may come in any order; whoever has the lock encrypts the next segment.
        with in_order:
            segment = encoder.encrypt(next(plaintext))
        coded = encoder.code(segment)
        with in_order:
            return encoder.add(coded)

    waiting = deque(pool.submit(work) for _ in range(min(3, len(segments))))
    for _ in range(len(segments) - len(waiting)):
        writes = waiting.popleft().result()
        waiting.append(pool.submit(work))
        yield from writes
    for future in waiting:
        yield from future.result()
    yield from encoder.finish()


def verify(pool: ThreadPoolExecutor) -> None:
    """
    Compare what is measured with a recorded file.

    Raises:
        PipegridError: the shares are wrong, so no figure would mean anything.
    """
    cases = json.loads(VECTORS.read_text("utf-8"))["cases"]
    case = next(case for case in cases if case["name"] == VECTOR)
    spec = case["plaintext"]
    plaintext = memoryview(hashlib.shake_128(spec["seed"].encode()).digest(spec["length"]))
    params = Params(case["k"], case["n"], case["max_segment_size"])
    geometry = params.geometry(len(plaintext))
    convergence = bytes.fromhex(case["convergence"])
    segments = cut(plaintext, geometry)
    for writes in (
        encode_one_thread(geometry, convergence, segments),
        encode_two_threads(geometry, convergence, segments, pool),
    ):
        shares: dict[int, dict[int, bytes]] = {}
        for write in writes:
            shares.setdefault(write.share_number, {})[write.offset] = b"".join(write.pieces)
        for number, expected in enumerate(case["share_sha256"]):
            share = b"".join(part for _, part in sorted(shares[number].items()))
            if hashlib.sha256(share).hexdigest() != expected:
                raise PipegridError(
                    f"share {number} of the recorded file {VECTOR} is wrong: the encoder is broken, "
                    "so its speed means nothing; run the tests"
                )


def cut(plaintext: memoryview, geometry: Geometry) -> list[memoryview]:
    """Return the plaintext of each segment."""
    step = geometry.segment_bytes
    return [plaintext[start : start + step] for start in range(0, len(plaintext), step)]


class Bench:
    """The things to measure, each on the same plaintext; a call does the work once."""

    def __init__(self, params: Params, megabytes: int, pool: ThreadPoolExecutor) -> None:
        """Make fresh random plaintext, a buffer for each segment, as a file would be read."""
        self._geometry = geometry = params.geometry(megabytes * 1_000_000)
        self._segments = [
            memoryview(os.urandom(geometry.segment_length(index)))
            for index in range(geometry.num_segments)
        ]
        self._pool = pool

    def measures(self) -> dict[str, Callable[[], object]]:
        """Return what can be measured, by name. (The decoder's place is here.)"""
        calls: dict[str, Callable[[], object]] = {
            "sha256": self.sha256,
            "sha256_2": self.sha256_two_threads,
            "aes": self.aes,
        }
        for piece_bytes in ZFEC_PIECE_BYTES:
            for keep in (False, True):
                calls[zfec_name(piece_bytes, keep)] = self.zfec(piece_bytes, keep)
        if erasure.library() != "zfec":
            calls["isal"] = self.isal
        calls["encode_1"] = self.encode_1
        calls["encode_2"] = self.encode_2
        calls["decode_parity"] = self.decode_parity
        return calls

    def sha256(self) -> None:
        """Hash each segment once."""
        for segment in self._segments:
            hashlib.sha256(segment).digest()

    def sha256_two_threads(self) -> None:
        """Do the same on two threads: what the machine's second core is worth just now."""
        for _ in self._pool.map(lambda segment: hashlib.sha256(segment).digest(), self._segments):
            pass

    def aes(self) -> None:
        """Encrypt each segment into the same buffer."""
        cipher = StreamCipher(bytes(16))
        output = memoryview(bytearray(self._geometry.segment_bytes))
        for segment in self._segments:
            cipher.apply(segment, output[: len(segment)])

    def zfec(self, piece_bytes: int, keep: bool) -> Callable[[], None]:
        """Return a call that makes all parity in pieces; keep: hold those of a segment together."""
        k, n = self._geometry.required_shares, self._geometry.total_shares
        coder = zfec.Encoder(k, n)
        numbers = tuple(range(k, n))

        def encode() -> None:
            for segment in self._segments:
                block_bytes = len(segment) // k
                size = piece_bytes or block_bytes
                kept = []
                for start in range(0, block_bytes, size):
                    end = min(start + size, block_bytes)
                    stripe = tuple(
                        segment[j * block_bytes + start : j * block_bytes + end] for j in range(k)
                    )
                    pieces = coder.encode(stripe, numbers)
                    if keep:
                        kept.append(pieces)

        return encode

    def isal(self) -> None:
        """Make all parity as the encoder does."""
        k, n = self._geometry.required_shares, self._geometry.total_shares
        for segment in self._segments:
            block_bytes = len(segment) // k
            for start, end in erasure.stripes(block_bytes):
                stripe = [
                    segment[j * block_bytes + start : j * block_bytes + end] for j in range(k)
                ]
                erasure.encode_stripe(stripe, tuple(range(k, n)), k, n)

    def encode_1(self) -> None:
        """Encode the file on this thread."""
        self._drain(encode_one_thread(self._geometry, b"speedtest", self._segments))

    def encode_2(self) -> None:
        """Encode the file on two threads."""
        self._drain(encode_two_threads(self._geometry, b"speedtest", self._segments, self._pool))

    def _drain(self, writes: Iterator[ShareWrite]) -> None:
        window: deque[ShareWrite] = deque(maxlen=IN_FLIGHT_SEGMENTS * self._geometry.total_shares)
        for write in writes:
            window.append(write)

    def decode_parity(self) -> None:
        """Restore each segment from its last k blocks; their content does not matter."""
        k, n = self._geometry.required_shares, self._geometry.total_shares
        for segment in self._segments:
            size = len(segment) // k
            blocks = {n - k + j: segment[j * size : (j + 1) * size] for j in range(k)}
            erasure.decode(blocks, k, n, k * size)


def zfec_name(piece_bytes: int, keep: bool) -> str:
    """Return the name of a zfec figure."""
    size = f"{piece_bytes // 1024}KiB" if piece_bytes else "block"
    return f"zfec_{size}_{'fresh' if keep else 'reused'}"


def run(params: Params, megabytes: int, rounds: int) -> Result:
    """Measure everything; one round before the first is thrown away."""
    speeds: dict[str, list[float]] = {}
    faults: dict[str, list[float]] = {}
    with ThreadPoolExecutor(2) as pool:
        verify(pool)
        for number in range(rounds + 1):
            bench = Bench(params, megabytes, pool)
            for name, call in bench.measures().items():
                faulted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                started = time.perf_counter()
                call()
                elapsed = time.perf_counter() - started
                faulted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faulted
                if number:
                    speeds.setdefault(name, []).append(megabytes / elapsed)
                    faults.setdefault(name, []).append(faulted / megabytes)
    return Result(
        params,
        megabytes,
        {name: Figure(tuple(values)) for name, values in speeds.items()},
        {name: statistics.median(values) for name, values in faults.items()},
    )


def table(result: Result) -> Iterator[str]:
    """Yield the lines for a person."""
    bound = result.bound
    yield (
        f"{result.params.required_shares} of {result.params.total_shares}, "
        f"{result.megabytes} MB a round, segments of {DEFAULT_SEGMENT_BYTES >> 20} MiB"
    )
    yield f"{'MB/s of plaintext':<38}{'median':>8}{'low':>8}{'high':>8}{'faults/MB':>11}"
    for name, figure in result.figures.items():
        note = ""
        if name == "encode_1":
            note = f"  {100 * figure.median / bound:.0f} % of the bound, {bound:.0f}"
        if name in ("encode_2", "sha256_2"):
            one = result.figures[name.replace("_2", "_1") if "encode" in name else "sha256"].median
            note = f"  {figure.median / one:.2f} times one thread"
        label = NAMES.get(name, name.replace("_", " "))
        spread = f"{min(figure.rounds):>8.0f}{max(figure.rounds):>8.0f}"
        yield f"{label:<38}{figure.median:>8.0f}{spread}{result.faults[name]:>11.0f}{note}"
    yield f"bound from SHA-256, AES and {result.best_coder.replace('_', ' ')}: the medians of this run"


def main(arguments: list[str], out: TextIO) -> int:
    """Run, print, and return the exit status."""
    parser = argparse.ArgumentParser(description="speed of the codec on this machine")
    parser.add_argument("--megabytes", type=int, default=16, help="plaintext a round (16)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (7)")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--tiny", action="store_true", help="one short round, to see that it runs")
    options = parser.parse_args(arguments)
    if options.megabytes < 1 or options.rounds < 1:
        parser.error("--megabytes and --rounds must be at least 1")
    megabytes, rounds = (1, 1) if options.tiny else (options.megabytes, options.rounds)
    result = run(PARAMS, megabytes, rounds)
    if options.json:
        print(json.dumps(result.report()), file=out)
    else:
        for line in table(result):
            print(line, file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdout))
