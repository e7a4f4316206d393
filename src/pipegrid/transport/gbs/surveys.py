"""Asking one server about many files in one message, as long as it takes that; see ``transport.surveys``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred

from pipegrid.errors import ServerError
from pipegrid.http11.raw import RawRequest, RawResponse
from pipegrid.transport.gbs.answers import GbsAnswers
from pipegrid.transport.gbs.requests import GbsRequests

if TYPE_CHECKING:
    from pipegrid.transport.surveys import Question, Surveyed

NO_SURVEYS = (404, 405)
"""What a server says to a survey that knows none."""


class GbsSurveys:
    """
    Of one server.

    Attributes:
        taken: it has not refused one yet.
    """

    def __init__(self, requests: GbsRequests, answers: GbsAnswers) -> None:
        self._requests = requests
        self._answers = answers
        self.taken = True
        self._asked = False

    def may_offer(self) -> bool:
        """Whether to ask what the server takes: once, for the next time."""
        if self._asked or not self.taken:
            return False
        self._asked = True
        return True

    def ask(
        self, send: Callable[[RawRequest], Deferred[RawResponse]], questions: Sequence[Question]
    ) -> Deferred[list[Surveyed | ServerError] | None]:
        """Ask; fires with None if the server takes none after all."""

        def unpack(answer: RawResponse) -> list[Surveyed | ServerError] | None:
            if answer.status in NO_SURVEYS:
                self.taken = False
                return None
            return self._answers.survey(answer, questions)

        return send(self._requests.survey(questions)).addCallback(unpack)
