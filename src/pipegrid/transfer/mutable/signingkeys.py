"""
Key pairs of new files, made in worker threads, and one ahead where several are wanted.

A key takes a tenth of a second or more of a core. A command that makes one file has it made while connections
come up; a program that makes a second one will make a third, so from then on one is made ahead.
"""

from __future__ import annotations

from twisted.internet.defer import Deferred

from pipegrid.core.mutable import keys
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.reactor.workers import CpuWorkers


class SigningKeys:
    """Gives key pairs, each once."""

    def __init__(self, workers: CpuWorkers) -> None:
        self._workers = workers
        self._ahead: Deferred[SigningKey] | None = None
        self._taken = 0

    def prepare(self) -> None:
        """Begin to make a key that will be wanted."""
        if self._ahead is None:
            self._ahead = self._workers.run(keys.generate)
            self._ahead.addErrback(lambda _: None)  # whoever takes it then makes its own

    async def take(self) -> SigningKey:
        """Return a key pair that nobody else has."""
        ahead, self._ahead = self._ahead, None
        self._taken += 1
        key = None if ahead is None else await ahead
        if key is None:
            key = await self._workers.run(keys.generate)
        if self._taken > 1:
            self.prepare()
        return key
