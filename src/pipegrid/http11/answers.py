"""
Handing out what was received, to the request that it answers: the first of those that were written.

An answer that nobody wants is read to its end if that is near; else the connection ends. A reader that fails
fails alone: its request is taken back, and its neighbours do not suffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from pipegrid.errors import PipegridError
from pipegrid.http11.errors import ResponseError
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.lane import Lane
from pipegrid.http11.parser import END, Event, ResponseHead

_log = Logger()


class AnswerReceiver(Protocol):
    """The connection, to which things happen while answers are handed out."""

    def answer_is_complete(self, exchange: Exchange) -> None:
        """It is the first of those that were written, and is still there."""

    def may_send_body(self) -> None:
        """The server has seen the head of a request, and wants the body."""

    def cancel(self, exchange: Exchange, error: PipegridError) -> None:
        """The exchange's reader raised: take the request back, and let it fail with ``error``."""

    def too_much(self, limit_bytes: int) -> None:
        """An answer that nobody wants is longer than that, beyond what came while it was wanted."""


class Answers:
    """
    Of one connection.

    Attributes:
        round_trip_s: the shortest that was seen, from a light request alone on its way to the answer's
            head; None before.
        over: nothing more is handed out; the connection has ended.
    """

    __slots__ = ("_clock", "_discard_limit_bytes", "_lane", "_receiver", "over", "round_trip_s")

    def __init__(
        self, clock: IReactorTime, lane: Lane, discard_limit_bytes: int, receiver: AnswerReceiver
    ) -> None:
        self._clock = clock
        self._lane = lane
        self._discard_limit_bytes = discard_limit_bytes
        self._receiver = receiver
        self.round_trip_s: float | None = None
        self.over = False

    def hand_out(self, events: Iterable[Event], server: str) -> None:
        """Hand what was received to whom it is for. Their code may call anything of the connection."""
        written = self._lane.written
        for event in events:
            if self.over:
                break  # by what an earlier event caused
            exchange = written[0]
            try:
                if type(event) is bytes:
                    exchange.received_bytes += len(event)
                    if not exchange.abandoned:
                        exchange.body_received(event)
                    else:
                        self.discard(exchange)
                elif event is END:
                    self._receiver.answer_is_complete(exchange)
                elif type(event) is ResponseHead:
                    self._note_round_trip(exchange)
                    exchange.response = event
                    exchange.received_bytes = event.head_bytes
                    if not exchange.abandoned:
                        exchange.head_received(event)
                    else:
                        self.discard(exchange)
                elif exchange.expects_continue:
                    self._receiver.may_send_body()
            except Exception as error:  # of a reader
                _log.failure("A reader of an HTTP answer failed")
                message = f"The reader of an answer of {server} failed ({error!r})."
                self._receiver.cancel(exchange, ResponseError(message, server))

    def discard(self, exchange: Exchange) -> None:
        """An answer that nobody wants is read to its end only if that is near."""
        head = exchange.response
        assert head is not None
        answer_bytes = exchange.received_bytes
        if head.length is not None:
            answer_bytes = head.head_bytes + head.length
        if answer_bytes - exchange.wanted_bytes > self._discard_limit_bytes:
            self._receiver.too_much(self._discard_limit_bytes)

    def _note_round_trip(self, exchange: Exchange) -> None:
        if exchange.written_s is not None:
            round_trip_s = self._clock.seconds() - exchange.written_s
            if self.round_trip_s is None or round_trip_s < self.round_trip_s:
                self.round_trip_s = round_trip_s
