"""Unfinished shares on a Foolscap server: which bytes were sent, and when to send ``close``."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.core.spans import Range, Spans
from pipegrid.errors import ServerError, ServerRefused, WrongSecret
from pipegrid.reactor.deferreds import Waiters
from pipegrid.transport.foolscap.link import FoolscapLink
from pipegrid.transport.interface import no_upload
from pipegrid.wire.storage_messages import Pieces, WriteAnswer


class UnfinishedShare:
    """
    One unfinished share, and the remote writer for it.

    Invariant: ``sent`` contains exactly the bytes that were written successfully or are in flight.

    Attributes:
        overlaps: whether a write overlapped bytes that were sent before, so that the server may refuse that
            write.
        closing: whether ``close`` was sent.
        damaged: whether a write failed after ``close`` was sent.
    """

    def __init__(self, writer: Any, share_bytes: int, upload_secret: bytes) -> None:
        self.writer = writer
        self.share_bytes = share_bytes
        self.upload_secret = upload_secret
        self.sent = Spans()
        self.overlaps = False
        self.closing = False
        self.damaged = False
        self._written = Spans()
        self._in_flight: dict[object, Range] = {}
        self._settled: Waiters[None] = Waiters()

    @property
    def complete(self) -> bool:
        """Whether all bytes of the share are written or in flight."""
        return self.sent.total == self.share_bytes

    def send(self, begin: int, end: int) -> object:
        """Record that a write of these bytes is sent; return a token for ``answered``."""
        self.overlaps = self.overlaps or bool(self.sent.overlap(begin, end))
        self.sent.add(begin, end)
        token = object()
        self._in_flight[token] = (begin, end)
        return token

    def answered(self, token: object, good: bool) -> None:
        """Record the response to the write that has this token."""
        begin, end = self._in_flight.pop(token)
        if good:
            self._written.add(begin, end)
        else:
            self.damaged = self.damaged or self.closing
            self.sent = Spans((*self._written, *self._in_flight.values()))
        if not self._in_flight:
            self._settled.fire(None)

    async def settled(self) -> None:
        """Wait until no write is in flight."""
        if self._in_flight:
            await self._settled.wait()

    def required(self) -> tuple[Range, ...]:
        """Return the ranges that were not sent yet, or whose writes failed."""
        return tuple(self.sent.gaps(0, self.share_bytes))


class FoolscapUploads:
    """
    All unfinished shares of one connection.

    The contract has no ``close``, but Foolscap has one: ``close`` is sent directly after the write that
    completes a share. So a share takes one round trip after its allocation, however many writes it takes.

    This is safe as long as the server can refuse no write because of its content. It may refuse an
    overlapping write, since it compares the bytes with the existing ones. So if writes overlap, the share is
    closed only after all its writes are answered. That takes another round trip, but regular uploads do not
    overlap. If a write fails for another reason (a full disk) after ``close`` was sent, the share fails.
    PipeGrid's servers then refuse the ``close``; other servers may keep a damaged share, which its hashes
    reveal.

    Source: how Tahoe-LAFS 1.20 behaves.

    Args:
        server: the server's name for messages.
        close_behind: whether ``close`` is sent before the response to the completing write has arrived.
    """

    def __init__(self, link: FoolscapLink, server: str, close_behind: bool = True) -> None:
        self._link = link
        self._server = server
        self._close_behind = close_behind
        self._shares: dict[tuple[bytes, int], UnfinishedShare] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def lost(self) -> None:
        """Drop all unfinished shares: the server has dropped them when the connection was lost."""
        self._shares.clear()

    def began(
        self, storage_index: bytes, writers: dict[int, Any], share_bytes: int, upload_secret: bytes
    ) -> None:
        """
        Record the writers that an allocation returned, by share number; each share has ``share_bytes`` bytes.
        """
        for number, writer in writers.items():
            self._shares[storage_index, number] = UnfinishedShare(
                writer, share_bytes, upload_secret
            )

    async def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
    ) -> WriteAnswer:
        """
        Send a write, followed by ``close`` if the write completes the share. Both are sent before this method
        waits.

        Raises:
            NoSuchShare, WrongSecret, ServerRefused: as ``StorageServer.write``; nothing was sent.
        """
        share = self._find(storage_index, share_number, upload_secret)
        message = b"".join(data)
        end = offset + len(message)
        if offset < 0 or end > share.share_bytes:
            raise ServerRefused(
                f"bytes {offset} to {end} lie outside of share {share_number}, for which {self._server}"
                f" allocated {share.share_bytes} bytes; write within them",
                self._server,
            )
        token = share.send(offset, end)
        complete, required = share.complete, share.required()
        written = self._link.call(share.writer, "write", offset, message)
        closed = None
        if complete and self._close_behind and not share.overlaps:
            closed = self._close(storage_index, share_number, share)
        try:
            await written
        except ServerError:
            if closed is not None:
                closed.addErrback(lambda _: None)  # ignored: the write's error is reported
            share.answered(token, False)
            raise
        share.answered(token, True)
        if not complete:
            return WriteAnswer(False, required)
        await share.settled()
        if closed is None:
            if not share.complete:
                return WriteAnswer(False, share.required())  # another write failed meanwhile
            if share.closing:
                raise no_upload(self._server, share_number)
            closed = self._close(storage_index, share_number, share)
        await closed
        if share.damaged:
            raise ServerRefused(
                f"{self._server} refused other bytes of share {share_number}, so what it keeps of the"
                " share may be damaged; use another server",
                self._server,
            )
        return WriteAnswer(True)

    async def abort(self, storage_index: bytes, share_number: int, upload_secret: bytes) -> None:
        """Abort an unfinished share on the server, and drop it here; raises the same errors as ``write``."""
        share = self._find(storage_index, share_number, upload_secret)
        del self._shares[storage_index, share_number]
        await self._link.call(share.writer, "abort")

    def _find(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> UnfinishedShare:
        share = self._shares.get((storage_index, share_number))
        if share is None:
            raise no_upload(self._server, share_number)
        if share.upload_secret != upload_secret:
            raise WrongSecret(
                f"share {share_number} is being uploaded to {self._server} under another secret;"
                " wait for that upload to end",
                self._server,
            )
        return share

    def _close(
        self, storage_index: bytes, share_number: int, share: UnfinishedShare
    ) -> Deferred[Any]:
        share.closing = True
        self._shares.pop((storage_index, share_number), None)
        return self._link.call(share.writer, "close")
