"""
Reads the files of a mounted tree, from the cache or from the grid.

A file that is read in sequence is one download, which stays ahead of its reader. If a program opens the files
of a directory in order, small files are fetched in advance.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import attrs

from pipegrid.core.caps import Cap, ChkCap, LitCap, MutableCap
from pipegrid.core.hashes import Buffer
from pipegrid.errors import PipegridError
from pipegrid.mount.block_cache import BLOCK_BYTES, BlockCache
from pipegrid.mount.mounted_tree import AccessOrder, MountedPlace
from pipegrid.reactor.deferreds import RequestSet, Waiters
from pipegrid.tree.directory_views import DirectoryViews
from pipegrid.tree.read_ahead import WHOLE_BYTES, FileReader, ReadSpace
from pipegrid.tree.tree_grid import Grid

AHEAD_BYTES = 16 << 20
"""Maximum bytes that a download fetches before the program reads them; less at the start of a download."""

KEPT_BEHIND_BYTES = 4 << 20
"""How many bytes are kept after they were read: the kernel requests several ranges at once, in any order."""

READING_BYTES = 64 << 20
"""Maximum memory of all downloads together."""

MOST_FETCHED_AHEAD = 64
"""How many small files are fetched in advance at the same time."""


@attrs.define(eq=False)
class OpenedFile:
    """
    A file that programs have open.

    Attributes:
        cap: the read cap.
        size: size in bytes when the file was opened.
        data: content of a literal file; None for other files.
        is_fixed: whether the content never changes, so that it can be cached.
        users: how often the file is open now.
    """

    cap: Cap
    size: int
    data: bytes | None
    is_fixed: bool
    reader: FileReader
    users: int = 0


class FileContents:
    """
    Reads the files of a mounted tree; call all methods except ``read`` in the reactor's thread.

    Args:
        cache: None: no content is cached, and no file is fetched in advance.
        in_reactor: makes the reactor's thread call a function later; may be called in any thread.
    """

    def __init__(
        self,
        grid: Grid,
        views: DirectoryViews,
        cache: BlockCache | None,
        in_reactor: Callable[[Callable[[], object]], object],
    ) -> None:
        self._grid = grid
        self._in_reactor = in_reactor
        self._views = views
        self._cache = cache
        self._space = ReadSpace(AHEAD_BYTES, READING_BYTES, KEPT_BEHIND_BYTES)
        self._order = AccessOrder()
        self._opened: dict[Cap, OpenedFile] = {}
        self._ahead: dict[Cap, Waiters[bytes]] = {}
        self._running: RequestSet[ChkCap] = RequestSet(grid.clock)
        self._closed = False

    async def open(self, place: MountedPlace) -> OpenedFile:
        """
        Open a file.

        Raises:
            OSError: this is not a file, or no read cap is known.
            PipegridError: the size of a mutable file cannot be read.
        """
        node = place.node
        cap = node.cap
        if node.kind == "directory":
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if node.kind != "file" or cap is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fetch_ahead(place)
        found = self._opened.get(cap)
        if found is None:
            if isinstance(cap, (ChkCap, LitCap)):
                size = cap.size
            else:
                size = await self._grid.size(cap)
                if isinstance(cap, MutableCap):
                    self._views.sized(cap, size)
            data = cap.data if isinstance(cap, LitCap) else None
            reader = FileReader(self._grid, cap, size, self._space)
            found = OpenedFile(cap, size, data, not isinstance(cap, MutableCap), reader)
            if found.is_fixed:
                self._opened[cap] = found
        found.users += 1
        return found

    def release(self, file: OpenedFile) -> None:
        """Close a file once; after its last close, end its download."""
        file.users -= 1
        if not file.users:
            if self._opened.get(file.cap) is file:
                del self._opened[file.cap]
            file.reader.close()

    def read(
        self,
        file: OpenedFile,
        offset: int,
        length: int,
        fetch: Callable[[int, int], Sequence[Buffer]],
    ) -> bytes:
        """
        Return a range of a file, shorter if it extends beyond the end; may be called in any thread.

        Args:
            fetch: returns the pieces of a range from the grid; calls the method ``fetch`` in the reactor's
                thread.
        """
        end = min(offset + length, file.size)
        if end <= offset:
            return b""
        if file.data is not None:
            return file.data[offset:end]
        if self._cache is None or not file.is_fixed:
            return self._from_download(file, offset, end - offset, fetch)
        first, stop = offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        blocks: list[bytes | memoryview | None] = [
            self._cache.read(file.cap, each, _length(file, each)) for each in range(first, stop)
        ]
        missing = [number for number, block in enumerate(blocks, first) if block is None]
        if missing:
            start = missing[0] * BLOCK_BYTES
            past = min((missing[-1] + 1) * BLOCK_BYTES, file.size)
            fetched = self._from_download(file, start, past - start, fetch)
            view = memoryview(fetched)
            for number in range(missing[0], missing[-1] + 1):
                at = number * BLOCK_BYTES - start
                block = blocks[number - first] = view[at : at + BLOCK_BYTES]
                if number in missing:
                    self._cache.write(file.cap, number, block)
            if (start, past) == (offset, end):
                return fetched
        data = b"".join(block for block in blocks if block is not None)
        begin = offset - first * BLOCK_BYTES
        return data if len(data) == end - offset else data[begin : begin + end - offset]

    def _from_download(
        self,
        file: OpenedFile,
        start: int,
        length: int,
        fetch: Callable[[int, int], Sequence[Buffer]],
    ) -> bytes:
        held = file.reader.read_held(start, length, self._in_reactor)
        return b"".join(fetch(start, length)) if held is None else held

    async def fetch(self, file: OpenedFile, start: int, length: int) -> Sequence[Buffer]:
        """
        Return a range of a file from the grid, in pieces.

        Raises:
            PipegridError: the grid could not fetch the range.
        """
        ahead = self._ahead.get(file.cap)
        if ahead is not None:
            with suppress(PipegridError):  # after a failure, the range is fetched below
                return [(await ahead.wait())[start : start + length]]
        return await file.reader.read_pieces(start, length)

    # Small files are fetched in advance.

    def _fetch_ahead(self, place: MountedPlace) -> None:
        parent = place.parent
        if parent is None or self._cache is None or self._closed:
            return
        names, positions = parent.names_of("file")
        for position in self._order.opened(id(parent), positions[place.path[-1]]):
            if position >= len(names) or len(self._ahead) >= MOST_FETCHED_AHEAD:
                break
            cap = parent.children[names[position]].cap
            if (
                isinstance(cap, ChkCap)
                and 0 < cap.size <= WHOLE_BYTES
                and cap not in self._ahead
                and not self._cache.has(cap, 0, min(cap.size, BLOCK_BYTES))
            ):
                self._ahead[cap] = Waiters()
                self._running.start(self._fetch_whole(cap, self._cache), cap)

    async def _fetch_whole(self, cap: ChkCap, cache: BlockCache) -> None:
        try:
            data = await self._grid.read(cap)
        except Exception as error:
            self._ahead.pop(cap).fail(error)
            return
        for number in range(-(-len(data) // BLOCK_BYTES)):
            cache.write(cap, number, data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
        self._ahead.pop(cap).fire(data)

    def close(self) -> None:
        self._closed = True
        self._running.cancel()
        for file in list(self._opened.values()):
            file.reader.close()
        self._opened.clear()


def _length(file: OpenedFile, number: int) -> int:
    """Return the length of a file's block: shorter than ``BLOCK_BYTES`` at the end of the file."""
    return min(BLOCK_BYTES, file.size - number * BLOCK_BYTES)
