"""Requests to allocate shares, many of which take several turns."""

from __future__ import annotations

from collections.abc import Iterator

from pipegrid.core.hashes import Buffer
from pipegrid.server.gbs import answers
from pipegrid.server.gbs.answers import Answer
from pipegrid.server.gbs.bodies import InSteps, Service
from pipegrid.server.gbs.requests import Admitted
from pipegrid.storage.paths import possible_numbers
from pipegrid.storage.store import ShareStore
from pipegrid.wire import gbs
from pipegrid.wire.gbs_http import UPLOAD_SECRET
from pipegrid.wire.messages import Allocation, UploadSecrets


class AllocateCall(InSteps):
    """
    A request to allocate shares of one file.

    Args:
        headers: lines to answer with.
    """

    def __init__(
        self, service: Service, admitted: Admitted, store: ShareStore, headers: bytes
    ) -> None:
        shares = (admitted.target.key,)
        super().__init__(service, admitted.rule, shares, self._allocate, self._say)
        self._admitted = admitted
        self._store = store
        self._headers = headers
        self._allocation = Allocation(frozenset(), frozenset())

    def _allocate(self, body: Buffer) -> Iterator[None]:
        try:
            wanted = gbs.unpack_allocate(body)
        except ValueError as error:
            self.refuse(answers.text(400, str(error)))
            return
        self._allocation = yield from self._store.allocate_in_steps(
            self._admitted.target.storage_index,
            possible_numbers(wanted.share_numbers),
            wanted.share_bytes,
            UploadSecrets(self._admitted.lease, self._admitted.secrets[UPLOAD_SECRET]),
            self._admitted.client,
        )

    def _say(self, _: Buffer) -> Answer:
        return answers.cbor(gbs.pack_allocation(self._allocation), headers=self._headers)
