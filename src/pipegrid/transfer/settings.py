"""Settings of transfers: how much to send in advance, how long to wait, and how much memory to use."""

from __future__ import annotations

from typing import NamedTuple

import attrs

from pipegrid.argument_checks import check_whole
from pipegrid.core.encoding_parameters import MAX_SEGMENT_BYTES
from pipegrid.flow.rate_timetable import RateLimit, RateTimetable

MIN_MEMORY_BYTES = 8 << 20
"""Minimum of ``memory_bytes``; with less memory, a file with segments of 1 MiB could not be transferred."""


class UploadSettings(NamedTuple):
    """
    How long an upload waits for servers.

    Attributes:
        grace_s, grace_share: how long stragglers may delay the upload once happiness holds without them:
            ``grace_s`` seconds, or the fraction ``grace_share`` of the time that the upload has taken,
            whichever is more.
        silence_s: a server that acknowledges nothing for this many seconds is given up.
    """

    grace_s: float = 2.0
    grace_share: float = 0.25
    silence_s: float = 60.0

    def grace(self, elapsed_s: float) -> float:
        """Return how long stragglers may delay an upload that has taken ``elapsed_s``."""
        return max(self.grace_s, self.grace_share * elapsed_s)


@attrs.frozen
class Limits:
    """
    How much of the machine and of its link a grid may use.

    Attributes:
        bytes_per_s: maximum rate for sending, and for receiving, each over all connections; or a
            ``RateTimetable`` with a maximum for each time of the week; None: no limit.
        jobs: maximum number of files stored at the same time; None: as many as memory and windows allow.
        memory_bytes: maximum data held in memory for uploads, and the same for downloads; None: about 64 MiB.
            The program's own memory is not included.
    """

    bytes_per_s: RateLimit | None = None
    jobs: int | None = None
    memory_bytes: int | None = None

    def __attrs_post_init__(self) -> None:
        """
        Check the limits.

        Raises:
            UsageError: a limit is too low for any transfer.
        """
        for name, least in (("bytes_per_s", 1), ("jobs", 1), ("memory_bytes", MIN_MEMORY_BYTES)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, RateTimetable):
                check_whole(value, name, least=least)


class UpkeepSettings(NamedTuple):
    """
    How much runs at the same time when many objects are checked or repaired.

    Attributes:
        jobs: maximum number of objects. Queries about a thousand objects keep a link with a round-trip time
            of 100 ms busy; each object takes about 10 KiB.
        memory_bytes: maximum memory for objects whose bytes are read, for verification or repair.
    """

    jobs: int = 1024
    memory_bytes: int = 48 << 20


class DownloadSettings(NamedTuple):
    """
    How much a download reads in advance, how long it waits, and how much memory it uses.

    Attributes:
        extra_shares: e, the number of shares beyond k that are read at first; for a range of several segments
            twice as many, each with half as much data.
        hedge_s: when no segment has been finished for this many seconds, and some servers lag, one more share
            is read.
        silence_s: when no byte has arrived for this many seconds, the servers with outstanding requests are
            given up.
        memory_bytes: maximum share data in memory, over all shares.
        max_segment_bytes: files with larger segments are not fetched, since a segment is held in memory as a
            whole.
    """

    extra_shares: int = 1
    hedge_s: float = 1.0
    silence_s: float = 60.0
    memory_bytes: int = 24 << 20
    max_segment_bytes: int = MAX_SEGMENT_BYTES


class MutableSettings(NamedTuple):
    """
    Limits and waits of operations on mutable files.

    Attributes:
        happy: servers of happiness that a write must reach, or the number of servers if that is smaller.
        read_bytes: bytes of each share to read first: all of a small share, or all but blocks and hash tree
            of a large share.
        write_read_bytes: ``read_bytes`` for writers, which need all of a directory at the same time.
        grace_s, grace_share: how long to wait for servers that lag; see ``UploadSettings``.
        silence_s: a server without activity for this many seconds has failed.
        time_limit_s: how many seconds an operation with conflicts is retried.
        first_wait_s, max_wait_s: smallest and largest upper bound of the random waits between retries; the
            bound doubles with each retry.
        unfinished_looks: a version that cannot be read, and is newer than all that can, is another client's
            running or interrupted write; after this many queries it is overwritten.
        max_content_bytes: maximum size of a file that is written whole, and so is held in memory with its
            shares.
        memory_bytes: maximum share data in memory while a file is read.
    """

    happy: int = 7
    read_bytes: int = 4000
    write_read_bytes: int = 1 << 16
    grace_s: float = 2.0
    grace_share: float = 0.25
    silence_s: float = 60.0
    time_limit_s: float = 120.0
    first_wait_s: float = 0.05
    max_wait_s: float = 8.0
    unfinished_looks: int = 5
    max_content_bytes: int = 128 << 20
    memory_bytes: int = 24 << 20

    def grace(self, elapsed_s: float) -> float:
        """Return how long stragglers may delay an operation that has taken ``elapsed_s``."""
        return max(self.grace_s, self.grace_share * elapsed_s)


GETS_AT_ONCE = 4
"""Number of files that are fetched at the same time unless the caller chooses another number."""


def limited(settings: DownloadSettings, limits: Limits) -> DownloadSettings:
    """
    Return the settings with ``memory_bytes`` reduced to what ``limits`` permits for one download.

    All downloads together get half of ``limits.memory_bytes`` for share data; the rest is for segments.
    """
    if limits.memory_bytes is None:
        return settings
    each = max(1 << 20, limits.memory_bytes // 2 // (limits.jobs or GETS_AT_ONCE))
    return settings._replace(memory_bytes=min(settings.memory_bytes, each))
