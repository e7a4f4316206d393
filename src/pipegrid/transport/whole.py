"""
``store_whole`` on a storage directory of this process: whole shares, each in one move where that can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure

from pipegrid.disk.commit import Committable
from pipegrid.disk.durability import Durability, Ending
from pipegrid.errors import ServerError, ServerRefused
from pipegrid.storage.store import ShareStore
from pipegrid.storage.uploads.upload import ShareUpload
from pipegrid.wire.messages import Allocation, Shares, Stored, UploadSecrets

_NONE: frozenset[int] = frozenset()


class WholeStoring:
    """
    Stores whole shares.

    Args:
        named: has an error say whose it is, and returns it.
    """

    def __init__(
        self,
        store: ShareStore,
        durability: Durability,
        named: Callable[[ServerError], ServerError],
    ) -> None:
        self._store = store
        self._durability = durability
        self._named = named

    def begin(
        self,
        wanted: Callable[[], bool],
        storage_index: bytes,
        shares: Shares,
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Stored]:
        """
        Write shares here and now; fires when all of them are durable, or have failed.

        Args:
            wanted: whether somebody still waits for it.

        Raises:
            ServerRefused, UsageError: as the allocation; nothing was stored.
        """
        complete = self._in_one_move(storage_index, shares, secrets)
        taken = frozenset(share.share_number for share in complete)
        if len(taken) == len(shares):
            return self._commit(complete, Allocation(_NONE, taken), {})
        try:
            others = shares.keys() - taken
            allocation = self._store.allocate(storage_index, others, share_bytes, secrets)
        except BaseException:
            for share in complete:
                share.discard()
            raise
        failed: dict[int, ServerError] = {}
        for number in sorted(others - allocation.already_have):
            try:
                share = self._store.upload(storage_index, number, secrets.upload)
                share.write(0, [shares[number]], wanted)
                if share.complete:
                    complete.append(share)
                else:
                    share.checkpoint()  # its client had asked for more before
            except ServerError as error:  # noqa: PERF203  it is rare that there are several
                failed[number] = self._named(error)
        there = Allocation(allocation.already_have, allocation.allocated | taken)
        return self._commit(complete, there, failed)

    def _in_one_move(
        self, storage_index: bytes, shares: Shares, secrets: UploadSecrets
    ) -> list[ShareUpload]:
        """Return those that were taken, up to the first that has to be uploaded in steps."""
        taken: list[ShareUpload] = []
        if not self._durability.syncs_unnamed:
            return taken
        for number, data in shares.items():
            share = self._store.take_whole(storage_index, number, data, secrets)
            if share is None:
                break
            taken.append(share)
        return taken

    def _commit(
        self, shares: Sequence[ShareUpload], allocation: Allocation, failed: dict[int, ServerError]
    ) -> Deferred[Stored]:
        """Make complete shares durable; what fails then is in the result, too."""
        if not shares:
            return succeed(Stored(allocation, failed))
        done: Deferred[Stored] = Deferred()  # cancelled or not, they are made durable
        left = len(shares)

        def ended(share: Committable, outcome: Ending) -> None:
            nonlocal left
            left -= 1
            if outcome is not None:
                assert isinstance(share, ShareUpload)
                failed[share.share_number] = self._named(_as_error(outcome))
            if not left and not done.called:
                done.callback(Stored(allocation, failed))

        self._durability.commit_each(shares, ended)
        return done


def _as_error(outcome: Ending) -> ServerError:
    error = outcome.value if isinstance(outcome, Failure) else outcome
    if isinstance(error, ServerError):
        return error
    return ServerRefused(f"cannot make a share durable: {error}; try again or use another server")
