"""
What the GBS server does with its mutable shares, beside reading one.

Source: the format reference, storage protocols, section 1.7.
"""

from __future__ import annotations

from twisted.internet.defer import Deferred

from pipegrid.server.gbs import answers
from pipegrid.server.gbs.answers import Answer
from pipegrid.server.gbs.requests import Admitted
from pipegrid.server.slotqueue import SlotQueue
from pipegrid.storage.mutable.slots import Slots
from pipegrid.wire import gbs, gbs_mutable
from pipegrid.wire.gbs_http import CANCEL_SECRET, RENEW_SECRET, WRITE_ENABLER
from pipegrid.wire.messages import LeaseSecrets, SlotResult, SlotSecrets


class SlotHandlers:
    """Carries out admitted requests, in the order that the queue keeps."""

    def __init__(self, slots: Slots, queue: SlotQueue) -> None:
        self._slots = slots
        self._queue = queue

    def read_test_write(self, admitted: Admitted, body: bytes) -> Answer | Deferred[Answer]:
        """Test, read, write. What writes may have to wait for the disk; what does not never does."""
        try:
            wanted = gbs_mutable.unpack_request(body)
        except ValueError as error:
            return answers.text(400, str(error))
        secrets, storage_index = admitted.secrets, admitted.target.storage_index
        call = self._queue.write if wanted.changes else self._queue.read
        result = call(
            storage_index,
            self._slots.testv_and_readv_and_writev,
            storage_index,
            SlotSecrets(
                LeaseSecrets(secrets[RENEW_SECRET], secrets[CANCEL_SECRET]), secrets[WRITE_ENABLER]
            ),
            wanted.changes,
            wanted.reads,
            self._queue.durable,
        )
        return result.addCallback(_answer_result)

    def list_shares(self, admitted: Admitted, body: bytes) -> Deferred[Answer]:
        """List the mutable shares."""
        storage_index = admitted.target.storage_index
        numbers = self._queue.read(storage_index, self._slots.list_shares, storage_index)
        return numbers.addCallback(_answer_numbers)


def _answer_result(result: SlotResult) -> Answer:
    return answers.cbor(gbs_mutable.pack_answer(result))


def _answer_numbers(numbers: frozenset[int]) -> Answer:
    return answers.cbor(gbs.pack_shares(numbers))
