"""
A directory with all below it as one ZIP file, which is written while the tree is read.

Small files are fetched ahead, and wait in memory, a bounded amount; a large one is streamed in its turn. A
client that reads slowly slows the servers down, and one that disconnects ends all of it.

What cannot be read is left out, and named in the last member and in the log. If the walk itself cannot go on,
the connection breaks before the list of members is sent, so that neither the client nor what opens the file
can take it for whole.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.internet.interfaces import IConsumer
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.core.caps import Cap, DirectoryCap, MutableCap, immutable_size
from pipegrid.core.text import counted, printable
from pipegrid.errors import AccessProhibited, DirectoryError, PipegridError, SourceError
from pipegrid.gateway.body_spool import BodySpool
from pipegrid.gateway.http_response import HttpResponse, ResponseStream, WebError, problem_of
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.byte_ranges import disposition
from pipegrid.gateway.web_api.check_json import storage_index_text
from pipegrid.gateway.web_api.download_turns import SMALL_BYTES, PacedDownload
from pipegrid.gateway.web_api.path_lookup import FoundObject
from pipegrid.gateway.web_ui.page_templates import plain_sentence
from pipegrid.gateway.web_ui.zip_stream import (
    MAX_PATH_BYTES,
    MemberNames,
    ZipMember,
    ZipStream,
    changed_at,
    harmless_name,
    is_program,
)
from pipegrid.reactor.deferreds import Wakeup
from pipegrid.tree.tree_grid import Grid
from pipegrid.tree.walk import Found, Met, TreePath, Unreadable, WalkLimits, walk

AHEAD_BYTES = 4 << 20
"""Of small files that are fetched ahead of what is being sent."""

MEMBER_BYTES = 4 << 10
"""What a member that waits takes in addition to its content; so at most a thousand wait."""

LIMITS = WalkLimits(reads=16, ahead_bytes=8 << 20, open_bytes=64 << 20, objects=2_000_000)

ZIP = "application/zip"

LOGGED_INDEXES = 20
"""Of what an archive lacks, in the log; the archive names all of it."""

_PATH_CHARACTERS = 4000
"""Of a path in the list of what is missing; the middle of a longer one is left out."""

_PIECE_BYTES = 64 << 10

log = Logger()


@attrs.define(eq=False)
class _Waiting:
    """
    A member that waits for its turn.

    Attributes:
        cap: of a file, or of what is missing.
        fetching: its content, if it is small, or may be.
        waits_bytes: what it counts for.
        error: why it cannot be archived; None: it can, as far as is known.
        end: nothing can be archived from here on.
    """

    member: ZipMember
    cap: Cap | None = None
    fetching: Deferred[bytes] | None = None
    waits_bytes: int = MEMBER_BYTES
    error: Exception | None = None
    end: BaseException | None = None


class ArchiveReader:
    """
    Walks a tree, and fetches what is small ahead of its turn.

    Args:
        top: the name of the directory that all members are in.
    """

    def __init__(self, grid: Grid, cap: DirectoryCap, top: str) -> None:
        self._grid = grid
        self._waiting: deque[_Waiting] = deque()
        self._first: _Waiting | None = None
        self._ahead_bytes = 0
        self._walked = False
        self._changed = Wakeup(grid.clock)
        self._taken = Wakeup(grid.clock)
        self._open: list[tuple[str, MemberNames]] = []
        self._top = harmless_name(top)
        self._walking = Deferred.fromCoroutine(self._walk(cap))
        self._walking.addErrback(self._walk_failed)

    async def next(self) -> _Waiting | None:
        """
        Return the member whose turn it is; None: all were returned.

        Raises:
            PipegridError: the tree cannot be walked any further.
        """
        while not self._waiting:
            if self._walked:
                return None
            await self._changed.wait()
        self._first = first = self._waiting.popleft()
        if first.end is not None:
            raise first.end
        return first

    def sent(self, one: _Waiting) -> None:
        """A member does not wait any more."""
        self._first = None
        self._ahead_bytes -= one.waits_bytes
        self._taken.fire()

    def close(self) -> None:
        """End the walk, and all that is fetched."""
        self._walking.cancel()
        for one in (*self._waiting, *([self._first] if self._first else [])):
            if one.fetching is not None:
                one.fetching.addErrback(lambda _: None)
                one.fetching.cancel()
        self._waiting.clear()

    async def _walk(self, cap: DirectoryCap) -> None:
        with walk(self._grid, cap, all_paths=True, limits=LIMITS) as tree:
            async for met in tree:
                while self._ahead_bytes >= AHEAD_BYTES:
                    await self._taken.wait()
                self._add(self._waiting_of(met))
        self._walked = True
        self._changed.fire()

    def _walk_failed(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self._add(_Waiting(ZipMember(""), end=failure.value))

    def _add(self, one: _Waiting) -> None:
        self._ahead_bytes += one.waits_bytes
        self._waiting.append(one)
        self._changed.fire()

    def _waiting_of(self, met: Met) -> _Waiting:
        error = self._unreadable(met)
        if error is not None:
            if not met.path:
                raise error
            return _Waiting(ZipMember(self._path_of(met.path)), met.cap, error=error)
        assert isinstance(met, Found)
        metadata = met.metadata
        if met.kind == "directory":
            return _checked(_Waiting(ZipMember(self._enter(met.path), 0, changed_at(metadata))))
        path = self._path_of(met.path)
        cap = met.cap
        size = immutable_size(cap) or 0
        member = ZipMember(path, size, changed_at(metadata), is_program(metadata))
        one = _checked(_Waiting(member, cap))
        if size > SMALL_BYTES or one.error is not None:
            return one
        one.waits_bytes += SMALL_BYTES if isinstance(cap, MutableCap) else size
        assert cap is not None
        one.fetching = self._grid.read(cap, 0, SMALL_BYTES + 1)
        return one

    def _unreadable(self, met: Met) -> Exception | None:
        """
        Return why something cannot be archived.

        Raises:
            AccessProhibited: a directory was blocked after the walk had read it.
        """
        if isinstance(met, Unreadable):
            return met.error
        if met.kind == "unknown":
            return DirectoryError("it is of a kind that this gateway cannot read")
        if met.kind == "directory" and met.listing is None:
            return DirectoryError("it is a directory that contains itself, and so has no end")
        try:
            self._grid.check_access(met.best or met.cap)
        except AccessProhibited as error:
            if met.kind == "directory":
                raise
            return error
        return None

    def _path_of(self, path: TreePath) -> str:
        del self._open[len(path) :]
        before, names = self._open[-1]
        return before + names.take(path[-1])

    def _enter(self, path: TreePath) -> str:
        inside = (self._path_of(path) if path else self._top) + "/"
        self._open.append((inside, MemberNames()))
        return inside


def _checked(one: _Waiting) -> _Waiting:
    if len(one.member.path.encode()) > MAX_PATH_BYTES:
        one.error = DirectoryError(
            f"its path has more than {MAX_PATH_BYTES} bytes, which archives cannot hold"
        )
    return one


class MissingMembers:
    """
    What an archive lacks, and why.

    Args:
        text: keeps the list until the end of the archive.
    """

    def __init__(self, text: BodySpool) -> None:
        self._text = text
        self._count = 0
        self._indexes: list[str] = []

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, path: str, cap: Cap | None, error: Exception) -> None:
        """
        Add one.

        Raises:
            BodyRefused: the disk has no space for it.
        """
        self._count += 1
        index = storage_index_text(cap)
        if index and len(self._indexes) < LOGGED_INDEXES:
            self._indexes.append(index)
        if len(path) > _PATH_CHARACTERS:
            half = _PATH_CHARACTERS // 2
            path = f"{path[:half]}\u2026{path[-half:]}"
        why = plain_sentence(printable(str(problem_of(error))))
        self._text.write(f"\n{path}\n    {why}\n".encode())
        self._text.check()

    async def send(self, archive: ZipStream, stream: ResponseStream, top: str) -> None:
        """Write the list as a member, next to the directory that all others are in."""
        them = counted(self._count, "file or directory", "files and directories")
        head = f"This archive of '{top}' is not complete. It lacks {them}:\n".encode()
        size = self._text.size
        archive.begin(ZipMember(f"MISSING FROM {top}.txt", len(head) + size))
        archive.write(head)
        for at in range(0, size, _PIECE_BYTES):
            await stream.ready()
            archive.write(self._text.read_at(at, min(_PIECE_BYTES, size - at)))
        archive.end()

    def log(self) -> None:
        """Log that there are any: by their storage indexes, since names are not for the log."""
        more = self._count - len(self._indexes)
        log.warn(
            "an archive was sent without {count} of its files and directories, which cannot be read; "
            "storage indexes: {indexes}{more}",
            count=self._count,
            indexes=", ".join(self._indexes) or "none",
            more=f", and {more} more" if more else "",
        )


@implementer(IConsumer)
class _Content:
    """Takes the content of one large member, and passes it on."""

    def __init__(self, archive: ZipStream, stream: ResponseStream, member: ZipMember) -> None:
        self._archive = archive
        self._stream = stream
        self._member = member
        self._begun = False

    def begin(self, size: int) -> tuple[int, int]:
        """
        Write the head, since the size is known now; returns the range that is wanted, all of it.

        Raises:
            SourceError: the file was replaced by another while it was read.
        """
        if self._begun:
            raise SourceError("a file of the tree was changed while it was read; try again")
        self._begun = True
        self._archive.begin(attrs.evolve(self._member, size=size))
        return 0, size

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """See ``IConsumer``; the producer is paused while the client reads slowly."""
        self._stream.follow(producer)

    def unregisterProducer(self) -> None:
        """See ``IConsumer``; what was written so far may still wait for the client."""
        self._stream.follow(None)

    def write(self, data: bytes) -> None:
        """See ``IConsumer``; the next bytes of the member."""
        self._archive.write(data)


class DirectoryArchive:
    """
    One archive that is sent.

    Args:
        listing: keeps the list of members until the end.
        missing: keeps the list of what cannot be read until the end.
        turns: who may fetch large files.
    """

    def __init__(
        self,
        grid: Grid,
        stream: ResponseStream,
        listing: BodySpool,
        missing: BodySpool,
        turns: DeferredSemaphore,
    ) -> None:
        self._grid = grid
        self._stream = stream
        self._archive = ZipStream(stream.write, listing)
        self._missing = MissingMembers(missing)
        self._turns = turns

    async def send(self, cap: DirectoryCap, top: str) -> None:
        """
        Send all of it that can be read, and the list of the rest.

        Raises:
            PipegridError: the directory itself cannot be read, or the tree not walked to its end; the rest
                was not sent.
        """
        reader = ArchiveReader(self._grid, cap, top)
        try:
            while (one := await reader.next()) is not None:
                await self._send(one)
                reader.sent(one)
        finally:
            reader.close()
        if self._missing:
            await self._missing.send(self._archive, self._stream, harmless_name(top))
            self._missing.log()
        for piece in self._archive.finish():
            await self._stream.ready()
            self._archive.write_listing(piece)
        self._archive.close()

    async def _send(self, one: _Waiting) -> None:
        await self._stream.ready()
        if one.error is not None:
            self._missing.add(one.member.path, one.cap, one.error)
        elif one.cap is None:
            self._archive.add(one.member)
        else:
            try:
                data = await self._fetch(one, one.cap)
            except PipegridError as error:
                self._archive.drop()
                self._missing.add(one.member.path, one.cap, error)
                return
            if data is None:
                self._archive.end()
            else:
                self._archive.add(one.member, data)

    async def _fetch(self, one: _Waiting, cap: Cap) -> bytes | None:
        """Return the content of a file; None: it is large, and was written."""
        if one.fetching is not None:
            data = await one.fetching
            if len(data) <= SMALL_BYTES:
                return data
        content = _Content(self._archive, self._stream, one.member)
        await PacedDownload(self._grid, cap, content, content.begin, self._turns).run()
        return None


async def send_archive(call: ApiRequest, found: FoundObject) -> HttpResponse | None:
    """
    Answer ``GET ?t=archive`` of a directory: a ZIP file of all that is in it.

    Raises:
        WebError: too many archives are being sent.
    """
    name = call.arguments.text("filename").removesuffix(".zip") or found.name or "directory"
    headers = {"Content-Disposition": disposition(f"{harmless_name(name)}.zip")}
    if call.is_head:
        return HttpResponse("", content_type=ZIP, headers=headers)
    site = call.http.site
    if not site.archives.tokens:
        raise WebError(
            503,
            f"{site.archives.limit} archives are being sent already, as many as may; try again when one has "
            "ended",
            {"Retry-After": "60"},
        )
    async with site.archives:
        call.http.setHeader("content-type", ZIP)
        for header, value in headers.items():
            call.http.setHeader(header, value)
        stream = ResponseStream(call.http)
        with closing(BodySpool(site.space)) as listing, closing(BodySpool(site.space)) as missing:
            archive = DirectoryArchive(call.grid, stream, listing, missing, site.downloads)
            await archive.send(found.directory, name)
        stream.finish()
    return None
