"""
Key pairs of new files, made in worker threads, and some ahead where several are wanted.

A key takes a tenth of a second of a core, or three: as often as it takes to meet two primes. A command that
makes one file has it made while connections come up; a program that makes a second one will make a third, so
from then on some are made ahead, one after the other, which evens out how long each of them takes.
"""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred

from pipegrid.core.mutable import keys
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.errors import UsageError
from pipegrid.reactor.workers import CpuWorkers

AHEAD = 3
"""Keys that stand ready for a program that makes several files."""


class SigningKeys:
    """Gives key pairs, each once."""

    def __init__(self, workers: CpuWorkers) -> None:
        self._workers = workers
        self._ready: deque[SigningKey] = deque()
        self._making: Deferred[SigningKey | None] | None = None
        self._taken = 0

    def prepare(self) -> None:
        """Begin to make a key that will be wanted, unless there are enough; more if several are."""
        wanted = AHEAD if self._taken > 1 else 1
        if self._making is not None or len(self._ready) >= wanted:
            return
        try:
            making: Deferred[SigningKey | None] = self._workers.run(keys.generate)
        except UsageError:  # the program ends: no key is wanted any more
            return
        making.addErrback(lambda _: None)  # whoever takes it then makes its own
        self._making = making
        making.addCallback(self._made, making)

    def _made(
        self, key: SigningKey | None, making: Deferred[SigningKey | None]
    ) -> SigningKey | None:
        if self._making is making:  # nobody waits for it
            self._making = None
            if key is not None:
                self._ready.append(key)
                self.prepare()
        return key

    def _handed_over(self, making: Deferred[SigningKey | None]) -> Deferred[SigningKey | None]:
        """Fire with a key that is being made; who gives up waiting leaves it to the next one."""
        waiting: Deferred[SigningKey | None] = Deferred()

        def made(key: SigningKey | None) -> None:
            if not waiting.called:
                waiting.callback(key)
            elif key is not None and len(self._ready) < AHEAD:
                self._ready.append(key)

        making.addCallback(made)
        return waiting

    async def take(self) -> SigningKey:
        """Return a key pair that nobody else has."""
        self._taken += 1
        key: SigningKey | None = None
        if self._ready:
            key = self._ready.popleft()
        elif self._making is not None:
            making, self._making = self._making, None
            if self._taken > 1:
                self.prepare()  # for whoever comes next, while this one waits
            key = await self._handed_over(making)
        if key is None:
            key = await self._workers.run(keys.generate)
        if self._taken > 1:
            self.prepare()
        return key
