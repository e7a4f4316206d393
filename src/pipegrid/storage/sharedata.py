"""
Where in its file the data of an immutable share end, also if a lease is counted behind them and not there, or
there and not counted.

As a rule that follows from the file's length and the number of leases. But a crash can leave a number that
became durable before the file's length did: then the last bytes of the data would be taken for a lease, and
with them goes the share, whose last section is what proves all others. So where the header says that there
should be more data, the share itself is asked, which says where its last section ends. A header alone is not
believed: what Tahoe-LAFS's clients asked room for before 1.18 was some hundred bytes too much. But data are
never longer than the room: one lease's length or less behind it is a lease that a process was killed before
it counted. Where more stands there, the header's number means nothing: a program does not keep it.

Source: the format reference, section 6; storage protocols, section 7.1.
"""

from __future__ import annotations

import os

from pipegrid.core import layout
from pipegrid.storage import containers
from pipegrid.storage.containers import HEADER_BYTES, ContainerHeader


def data_bytes(fd: int, header: ContainerHeader, file_bytes: int) -> int:
    """
    Return the length of the share data in an open file of so many bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: the file is too short for its leases, and does not say more.
    """
    by_leases = file_bytes - containers.container_bytes(0, header.lease_count)
    if header.is_saturated or by_leases < header.room_bytes:
        end = _last_section_end(fd)
        if (
            end is not None
            and by_leases < end <= file_bytes - HEADER_BYTES
            and header.has_room(end)
        ):
            return end
    elif 0 < by_leases - header.room_bytes <= containers.LEASE_BYTES:
        return header.room_bytes
    return containers.share_bytes(header, file_bytes)


def _last_section_end(fd: int) -> int | None:
    """Return how long the share says that it is; None if it has no layout that is known."""
    try:
        found = layout.parse_header(os.pread(fd, layout.MAX_HEADER_BYTES, HEADER_BYTES))
        length = os.pread(fd, found.ueb_length_bytes, HEADER_BYTES + found.uri_extension)
    except (ValueError, OverflowError):
        return None
    if len(length) < found.ueb_length_bytes:
        return None
    return found.uri_extension + found.ueb_length_bytes + int.from_bytes(length, "big")
