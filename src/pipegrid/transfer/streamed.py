"""What all consumers of a server's, or a download's, stream have in common: its producer."""

from __future__ import annotations

from twisted.internet.interfaces import IConsumer, IProducer, IPushProducer
from zope.interface import implementer


@implementer(IConsumer)
class StreamConsumer:
    """
    Keeps the producer of the stream that it consumes; what comes is for the ``write`` of each kind.

    Attributes:
        _producer: who can be paused; None before the stream has begun, and when it has ended.
    """

    _producer: IPushProducer | None = None

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        assert streaming, "streams come from push producers"
        self._producer = producer  # type: ignore[assignment]

    def unregisterProducer(self) -> None:
        self._producer = None

    def write(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        raise NotImplementedError
