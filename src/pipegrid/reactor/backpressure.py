"""How full a transport is, told to who is no producer himself."""

from __future__ import annotations

from typing import Protocol

from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer


class Writer(Protocol):
    """Who writes to the transport."""

    def output_full(self) -> None:
        """Write nothing more for now."""

    def output_free(self) -> None:
        """Go on writing: the transport has room again."""


@implementer(IPushProducer)
class Backpressure:
    """Told by the transport how full it is."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def pauseProducing(self) -> None:
        self._writer.output_full()

    def resumeProducing(self) -> None:
        self._writer.output_free()

    def stopProducing(self) -> None:
        """It is gone, and the writer will hear of it."""
