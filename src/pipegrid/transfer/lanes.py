"""
One share on its way to one server.

A lane gathers the encoder's small writes into batches of about 1 MiB (what a server takes fastest),
hands them to its peer's pipeline, and knows what was acknowledged. It never waits itself: the
upload looks at ``blocked`` and ``state``, and is woken whenever they may have changed.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core.encoder import ShareWrite
from pipegrid.core.hashes import Buffer
from pipegrid.errors import NoSuchShare, ServerError, ServerRefused
from pipegrid.transfer.peers import Peer
from pipegrid.wire.messages import UploadSecrets, WriteResult

BATCH_BYTES = 1 << 20
"""
Writes are gathered up to this size. A server was measured to take 75 MB/s in pieces of 32 KiB,
173 in 128 KiB and 357 in 1 MiB; larger ones only cost memory.
"""


class Lane:
    """
    The way of one share to one server.

    Args:
        missed: the first segments, ``[0, missed)``, went by before this lane was opened; they are
            coded again and sent at the end.
        changed: called after every event that may let the upload go on.

    Attributes:
        state: ``open``, then ``stored``, ``refused`` (the server will not), ``lost`` (it forgot the
            unfinished share), ``failed`` (it is gone) or ``dropped`` (taken back).
        acknowledged_bytes: what the server has confirmed.
        stalled_s: how long this lane has kept others waiting, so far.
        last_sign: when the server last acknowledged anything of this lane.
        has_trailer: whether the hashes behind the blocks have gone by.
        all_sent: whether every byte of the share has been handed to the pipeline.
        error: why it was refused, lost or failed.
    """

    def __init__(
        self,
        peer: Peer,
        share_number: int,
        storage_index: bytes,
        secrets: UploadSecrets,
        missed: int,
        changed: Callable[[], None],
        clock: IReactorTime,
    ) -> None:
        self.peer = peer
        self.share_number = share_number
        self.state = "open"
        self.error: ServerError | None = None
        self.missed = missed
        self.acknowledged_bytes = 0
        self.stalled_s = 0.0
        self.last_sign = clock.seconds()
        self.has_trailer = False
        self.all_sent = False
        self._storage_index = storage_index
        self._secrets = secrets
        self._changed = changed
        self._clock = clock
        self._pieces: list[Buffer] = []
        self._batch_offset = 0
        self._batch_bytes = 0
        self._room: Deferred[None] | None = None
        self._calls: set[Deferred[WriteResult]] = set()

    def __repr__(self) -> str:
        return f"<Lane share {self.share_number} to {self.peer.name}: {self.state}>"

    @property
    def blocked(self) -> bool:
        """Whether the server's window has no room for more of this share now."""
        return self.state == "open" and self._room is not None

    @property
    def ended(self) -> bool:
        """
        Whether the lane's state is final.

        A lane that seems lost is not while it has unanswered writes: one may complete the share.
        """
        return self.state != "open" and not (self.state == "lost" and self._calls)

    def silent_for(self, now: float) -> float:
        """Return how long the server has owed an answer without giving any."""
        return now - self.last_sign if self._calls and self.state == "open" else 0.0

    def finish(self) -> None:
        """Every byte has been sent."""
        self.flush()
        self.missed = 0
        self.all_sent = True
        self._check_complete()

    def send(self, write: ShareWrite) -> None:
        """Send the bytes, now or with the next batch. They must not change until acknowledged."""
        if self.state != "open":
            return
        if self._pieces and write.offset != self._batch_offset + self._batch_bytes:
            self.flush()
        if not self._pieces:
            self._batch_offset = write.offset
        self._pieces.extend(write.pieces)
        self._batch_bytes += write.length
        if self._batch_bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what has been gathered."""
        if not self._pieces or self.state != "open":
            return
        pieces, offset, length = self._pieces, self._batch_offset, self._batch_bytes
        self._pieces, self._batch_bytes = [], 0
        room = self.peer.pipeline.add(length, self._write, offset, pieces, length)
        if not room.called:
            self._room = room
            room.addBoth(self._has_room, room)

    def _has_room(self, _result: object, room: Deferred[None]) -> None:
        if self._room is room:
            self._room = None
            self._changed()

    def _write(self, offset: int, pieces: list[Buffer], length: int) -> Deferred[None]:
        """Return a Deferred that never fails: a pipeline is shared, a failure is this lane's own."""
        if self.state != "open":
            done: Deferred[None] = Deferred()
            done.callback(None)
            return done
        call = self.peer.server.write(
            self._storage_index, self.share_number, offset, pieces, self._secrets.upload
        )
        self._calls.add(call)
        return call.addCallbacks(
            self._written, self._write_failed, callbackArgs=(call, length), errbackArgs=(call,)
        )

    def _written(self, result: WriteResult, call: Deferred[WriteResult], length: int) -> None:
        self._calls.discard(call)
        if self.state == "open":
            self.last_sign = self._clock.seconds()
            self.acknowledged_bytes += length
            if result.complete:
                self.close("stored")
            self._check_complete()
        elif self.state == "lost" and result.complete:
            self.state = "stored"
        self._changed()

    def _check_complete(self) -> None:
        # All is sent and answered, and still the server wants more: it has lost something.
        if self.state == "open" and self.all_sent and not self._calls:
            self.close("lost")

    def _write_failed(self, failure: Failure, call: Deferred[WriteResult]) -> None:
        self._calls.discard(call)
        if self.state == "open":
            if failure.check(ServerError):
                self._fail(failure.value)  # type: ignore[arg-type]
            elif failure.check(CancelledError):
                self.close("dropped")
            else:
                failure.raiseException()
        self._changed()

    def _fail(self, error: ServerError) -> None:
        self.error = error
        if isinstance(error, NoSuchShare):
            self.close("lost")
        elif isinstance(error, ServerRefused):
            self.close("refused")
        else:
            self.close("failed")

    def close(self, state: str) -> None:
        """End the lane in this state and let go of its bytes; what is on the wire stays there."""
        if self.state != "open":
            return
        self.state = state
        self._pieces, self._batch_bytes = [], 0
        room, self._room = self._room, None
        if room is not None:
            room.cancel()

    def cancel(self, state: str) -> None:
        """End the lane in this state and give up all unanswered writes."""
        self.close(state)
        for call in list(self._calls):
            call.cancel()

    def abort(self) -> Deferred[None]:
        """Tell the server to forget the unfinished share; fires when told, never fails."""
        done = self.peer.server.abort(self._storage_index, self.share_number, self._secrets.upload)
        return done.addErrback(lambda failure: failure.trap(ServerError, CancelledError) and None)
