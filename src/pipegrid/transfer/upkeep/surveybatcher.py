"""
The questions to one server: gathered, sent as few messages, bounded, and not waited for without end.

What is asked during one turn of the reactor leaves at its end, in messages of up to ``MAX_QUESTIONS``; a full
one leaves at once. Before the first answer only that much is on its way to a server of which it is
not known how it wants to be asked.

A server that is silent for too long, or out of reach, is not asked again for a while: what is asked then
fails at once with the same error, so that a thousand objects do not wait for it one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import ServerError, ServerTimeout, ServerUnreachable
from pipegrid.transfer.peers import Peer
from pipegrid.transport import surveys
from pipegrid.transport.surveys import MAX_QUESTIONS, Question, Surveyed

QUESTIONS_AT_ONCE = 1024
"""On their way to one server: at 100 ms and half a kilobyte of answers each, 5 MB/s."""

REST_S = 30.0
"""For so long a server that was out of reach is not asked."""

OnAnswer = Callable[[Surveyed | ServerError], None]


class SurveyBatcher:
    """
    Gathers the questions to one server, and sends those of a turn together.

    Args:
        silence_s: a server that answers none of its questions for so long is given up.
        broken: called with what is no error of the server's.
    """

    def __init__(
        self,
        clock: IReactorTime,
        peer: Peer,
        silence_s: float,
        broken: Callable[[Failure], None],
    ) -> None:
        self._clock = clock
        self._peer = peer
        self._silence_s = silence_s
        self._broken = broken
        self._waiting: deque[tuple[Question, OnAnswer]] = deque()
        self._on_their_way: dict[Deferred[None], int] = {}
        self._unanswered = 0
        self._has_answered = False
        self._last_sign = clock.seconds()
        self._turn: IDelayedCall | None = None
        self._timer: IDelayedCall | None = None
        self._resting: ServerError | None = None
        self._rests_until = 0.0

    def __repr__(self) -> str:
        counts = f"{len(self._waiting)} wait, {self._unanswered} unanswered"
        return f"<SurveyBatcher for {self._peer.name}: {counts}>"

    def ask(self, question: Question, told: OnAnswer) -> None:
        """
        Ask the server, soon.

        Args:
            told: called once with the answer, or the error; not from within this call.
        """
        self._waiting.append((question, told))
        if self._turn is None:
            self._turn = self._clock.callLater(0, self._turn_is_over)

    def close(self) -> None:
        """Give up all questions; nobody is told."""
        self._waiting.clear()
        for timer in (self._turn, self._timer):
            if timer is not None and timer.active():
                timer.cancel()
        for sent in list(self._on_their_way):
            sent.cancel()

    def _turn_is_over(self) -> None:
        self._turn = None
        if self._resting is not None and self._clock.seconds() < self._rests_until:
            self._fail_waiting(self._resting)
            return
        self._send()

    def _send(self) -> None:
        sure = self._has_answered or surveys.takes(self._peer.server)
        most = QUESTIONS_AT_ONCE if sure else MAX_QUESTIONS
        while self._waiting and self._unanswered < most:
            batch = [
                self._waiting.popleft()
                for _ in range(min(MAX_QUESTIONS, len(self._waiting), most - self._unanswered))
            ]
            self._send_batch(batch)

    def _send_batch(self, batch: Sequence[tuple[Question, OnAnswer]]) -> None:
        if not self._unanswered:
            self._last_sign = self._clock.seconds()
        told: list[OnAnswer | None] = [call for _, call in batch]
        self._unanswered += len(batch)

        def answered(number: int, answer: Surveyed | ServerError) -> None:
            call, told[number] = told[number], None
            if call is not None:
                self._answered(call, answer)

        def ended(result: Failure | None) -> None:
            del self._on_their_way[sent]
            error: ServerError | None = None
            if isinstance(result, Failure):
                if result.check(CancelledError):
                    error = self._resting
                else:
                    self._broken(result)
            for call in told:
                if call is not None:
                    self._unanswered -= 1
                    if error is not None:
                        call(error)
            self._continue()

        sent = surveys.survey(self._peer.server, [question for question, _ in batch], answered)
        self._on_their_way[sent] = len(batch)
        sent.addBoth(ended)
        self._watch()

    def _answered(self, call: OnAnswer, answer: Surveyed | ServerError) -> None:
        self._unanswered -= 1
        if isinstance(answer, ServerUnreachable | ServerTimeout):
            self._rest(answer)
        else:
            self._last_sign = self._clock.seconds()
            self._has_answered = True
            self._resting = None
        call(answer)
        self._continue()

    def _continue(self) -> None:
        """Send more, in a turn of its own, once some room has come together."""
        if self._waiting and self._turn is None:
            self._turn = self._clock.callLater(0, self._turn_is_over)

    # Patience.

    def _rest(self, error: ServerError) -> None:
        self._resting = error
        self._rests_until = self._clock.seconds() + REST_S
        self._has_answered = False

    def _fail_waiting(self, error: ServerError) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, call in waiting:
            call(error)

    def _watch(self) -> None:
        if self._timer is None or not self._timer.active():
            self._timer = self._clock.callLater(self._silence_s, self._look)

    def _look(self) -> None:
        if not self._unanswered:
            return
        left_s = self._last_sign + self._silence_s - self._clock.seconds()
        if left_s > 0:
            self._timer = self._clock.callLater(left_s, self._look)
            return
        name = self._peer.name
        self._rest(ServerTimeout(f"{name} was silent for {self._silence_s:g} s", name, True))
        for sent in list(self._on_their_way):
            sent.cancel()
