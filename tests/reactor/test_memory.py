"""Memory that goes back to the system."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor import process_settings

PIECE_BYTES = 1 << 20


def resident_bytes() -> int:
    """Return how much this process has."""
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    ]
    return int(line.split()[1]) * 1024


class MemoryTests(SynchronousTestCase):
    """What was freed."""

    def test_it_goes_back(self) -> None:
        """Where the allocator would keep 48 MiB of a process, most of it is given back."""
        pieces = [bytearray(b"x" * PIECE_BYTES) for _ in range(48)]
        held = resident_bytes()
        pieces.clear()
        process_settings.trim_heap()
        self.assertLess(resident_bytes(), held - (32 << 20))
