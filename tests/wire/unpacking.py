"""Messages that the server unpacks in steps, unpacked at once."""

from __future__ import annotations

from pipegrid.core.hashes import Buffer
from pipegrid.wire import gbs_mutable
from pipegrid.wire.gbs_mutable import ReadTestWrite


def unpack_request(body: Buffer) -> ReadTestWrite:
    """Return what a read-test-write asks for."""
    steps = gbs_mutable.unpack_request_in_steps(body)
    while True:
        try:
            next(steps)
        except StopIteration as done:  # noqa: PERF203
            wanted: ReadTestWrite = done.value
            return wanted
