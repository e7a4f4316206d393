"""
A directory with everything below it as one ZIP file, which is sent while the tree is read.

Small files are fetched in advance and wait in memory, up to a limit; large files are streamed when it is
their turn. If the client reads slowly, less is fetched; if it disconnects, everything ends.

What cannot be read is left out, and listed in the last member and in the log. If the walk itself fails, the
connection is closed before the list of members is sent, so that clients and ZIP programs notice that the file
is incomplete.
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
"""Maximum memory of members that wait: small files are fetched in advance up to this limit."""

MEMBER_BYTES = 4 << 10
"""Memory counted for each waiting member in addition to its content; so about a thousand members can wait."""

LIMITS = WalkLimits(reads=16, ahead_bytes=8 << 20, open_bytes=64 << 20, objects=2_000_000)

ZIP = "application/zip"

LOGGED_INDEXES = 20
"""How many storage indexes of missing objects are logged; the archive lists all missing objects."""

_PATH_CHARACTERS = 4000
"""Maximum length of a path in the list of missing objects; of longer paths, the middle is left out."""

_PIECE_BYTES = 64 << 10

log = Logger()


@attrs.define(eq=False)
class _Waiting:
    """
    A member that waits until it is sent.

    Attributes:
        cap: cap of a file, or of an object that cannot be read; None for a directory.
        fetching: fires with the content of a file, or with its beginning if a mutable file is large; None:
            not fetched in advance.
        waits_bytes: memory counted for this member.
        error: why the member cannot be archived; None: no problem is known.
        end: why the walk failed, instead of a member; None: this is a member.
    """

    member: ZipMember
    cap: Cap | None = None
    fetching: Deferred[bytes] | None = None
    waits_bytes: int = MEMBER_BYTES
    error: Exception | None = None
    end: BaseException | None = None


class ArchiveReader:
    """
    Walks a tree, and fetches small files in advance.

    Args:
        top: name of the directory in the archive that contains all members.
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
        Return the next member to send; None: there are no more.

        Raises:
            PipegridError: the walk failed.
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
        """Note that a member was sent, which frees its memory."""
        self._first = None
        self._ahead_bytes -= one.waits_bytes
        self._taken.fire()

    def close(self) -> None:
        """Cancel the walk and all running fetches."""
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
        Return why an object cannot be archived; None: it can.

        Raises:
            AccessProhibited: a directory was prohibited after the walk had read it.
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
    The objects that an archive lacks, and why.

    Args:
        text: keeps the list until it is sent.
    """

    def __init__(self, text: BodySpool) -> None:
        self._text = text
        self._count = 0
        self._indexes: list[str] = []

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, path: str, cap: Cap | None, error: Exception) -> None:
        """
        Add an object to the list.

        Raises:
            BodyRefused: the disk has no space for the list.
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
        """Write the list as a member next to the directory that contains all other members."""
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
        """Log that objects are missing, with storage indexes, since the log contains no names."""
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
    """Consumes the content of one large member, and writes it to the archive."""

    def __init__(self, archive: ZipStream, stream: ResponseStream, member: ZipMember) -> None:
        self._archive = archive
        self._stream = stream
        self._member = member
        self._begun = False

    def begin(self, size: int) -> tuple[int, int]:
        """
        Write the head of the member, whose size is now known; return the range to fetch, which is the whole
        file.

        Raises:
            SourceError: the file was overwritten while it was read.
        """
        if self._begun:
            raise SourceError("a file of the tree was changed while it was read; try again")
        self._begun = True
        self._archive.begin(attrs.evolve(self._member, size=size))
        return 0, size

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """See ``IConsumer``; pauses the producer while the client reads slowly."""
        self._stream.follow(producer)

    def unregisterProducer(self) -> None:
        """See ``IConsumer``; the client may not have read everything yet."""
        self._stream.follow(None)

    def write(self, data: bytes) -> None:
        """See ``IConsumer``; writes the next bytes of the member."""
        self._archive.write(data)


class DirectoryArchive:
    """
    Sends one archive.

    Args:
        listing: keeps the list of members until it is sent.
        missing: keeps the list of missing objects until it is sent.
        turns: limits how many large files are fetched at the same time.
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
        Send everything that can be read, and the list of missing objects.

        Raises:
            PipegridError: the directory cannot be read, or the walk failed; then the archive is incomplete.
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
        """Return the content of a small file; None: the file is large, and was written to the archive."""
        if one.fetching is not None:
            data = await one.fetching
            if len(data) <= SMALL_BYTES:
                return data
        content = _Content(self._archive, self._stream, one.member)
        await PacedDownload(self._grid, cap, content, content.begin, self._turns).run()
        return None


async def send_archive(call: ApiRequest, found: FoundObject) -> HttpResponse | None:
    """
    Answer ``GET ?t=archive`` of a directory: a ZIP file of everything in it.

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
