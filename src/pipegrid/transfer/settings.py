"""How eager, how patient and how large transfers are; the defaults say why."""

from __future__ import annotations

import attrs

from pipegrid.arguments import check_whole
from pipegrid.core.encoding_parameters import MAX_SEGMENT_BYTES

MIN_MEMORY_BYTES = 8 << 20
"""With less a file of segments of one MiB would not get on."""


@attrs.frozen
class UploadSettings:
    """
    How patient an upload is.

    Attributes:
        grace_s, grace_share: stragglers may cost this much time, or this share of the time that
            the upload has taken so far, whichever is more, once happiness holds without them.
        silence_s: a server that acknowledges nothing for so long is given up.
    """

    grace_s: float = 2.0
    grace_share: float = 0.25
    silence_s: float = 60.0

    def grace(self, elapsed_s: float) -> float:
        """Return how long stragglers may keep an upload that has taken ``elapsed_s``."""
        return max(self.grace_s, self.grace_share * elapsed_s)


@attrs.frozen
class Limits:
    """
    How much of the machine and of its line a grid may take.

    Attributes:
        bytes_per_s: sent at most, and received at most, over all connections; None: as the line allows.
        jobs: files that are stored at once, at most; None: as many as memory and windows allow.
        memory_bytes: of data that is held, for uploads and for downloads; None: some 64 MiB. What the program
            itself takes comes on top.
    """

    bytes_per_s: int | None = None
    jobs: int | None = None
    memory_bytes: int | None = None

    def __attrs_post_init__(self) -> None:
        """
        Raises:
            UsageError: nothing could be done so.
        """
        for name, least in (("bytes_per_s", 1), ("jobs", 1), ("memory_bytes", MIN_MEMORY_BYTES)):
            value = getattr(self, name)
            if value is not None:
                check_whole(value, name, least=least)


@attrs.frozen
class UpkeepSettings:
    """
    How much is under way at once when many objects are looked after.

    Attributes:
        jobs: objects. Questions about a thousand fill a round trip of 100 ms; each is some 10 KiB here.
        memory_bytes: of objects whose bytes are fetched, to be verified or repaired.
    """

    jobs: int = 1024
    memory_bytes: int = 48 << 20


@attrs.frozen
class DownloadSettings:
    """
    How eager, how patient and how large a download is.

    Attributes:
        extra_shares: e, how many more shares than needed take part in the first race; twice as many
            do for a range of several segments, each with half as much.
        hedge_s: when no segment has been finished for so long, and some servers lag behind
            the others, one more share joins.
        silence_s: when nothing at all has come for so long, the servers that owe are given up.
        memory_bytes: of share data that may be held, over all shares.
        max_segment_bytes: files with larger segments are not fetched, since a segment is held whole.
    """

    extra_shares: int = 1
    hedge_s: float = 1.0
    silence_s: float = 60.0
    memory_bytes: int = 24 << 20
    max_segment_bytes: int = MAX_SEGMENT_BYTES


@attrs.frozen
class MutableSettings:
    """
    How eager, how patient and how large operations on mutable files are.

    Attributes:
        happy: servers of happiness that a write must reach, or all there are if they are fewer.
        read_bytes: of each share, for a start: all of a small one, all but blocks and tree of a large one.
        write_read_bytes: the same for writers, who want all of a directory at once.
        grace_s, grace_share: how long servers that lag behind the others are waited for; see
            ``UploadSettings``.
        silence_s: a server that gives no sign of life for so long has failed.
        patience_s: for so long an operation that meets other writers tries again.
        first_wait_s, max_wait_s: bounds of the random waits in between; they double.
        unfinished_looks: a version that is newer than all that can be read is somebody's write that has not
            ended, or never will; so many looks later it is written over.
        max_content_bytes: of a file that is written whole, and so is held in memory with its shares.
        memory_bytes: of share data, while a file is read.
    """

    happy: int = 7
    read_bytes: int = 4000
    write_read_bytes: int = 1 << 16
    grace_s: float = 2.0
    grace_share: float = 0.25
    silence_s: float = 60.0
    patience_s: float = 120.0
    first_wait_s: float = 0.05
    max_wait_s: float = 8.0
    unfinished_looks: int = 5
    max_content_bytes: int = 128 << 20
    memory_bytes: int = 24 << 20

    def grace(self, elapsed_s: float) -> float:
        """Return how long stragglers may keep an operation that has taken ``elapsed_s``."""
        return max(self.grace_s, self.grace_share * elapsed_s)


GETS_AT_ONCE = 4
"""Files that are fetched at once if nobody says otherwise."""


def limited(settings: DownloadSettings, limits: Limits) -> DownloadSettings:
    """
    Return the same with as much memory for share data as is allowed.

    All downloads together get half of it: the rest is for segments.
    """
    if limits.memory_bytes is None:
        return settings
    each = max(1 << 20, limits.memory_bytes // 2 // (limits.jobs or GETS_AT_ONCE))
    return attrs.evolve(settings, memory_bytes=min(settings.memory_bytes, each))
