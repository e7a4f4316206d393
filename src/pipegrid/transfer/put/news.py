"""
What has happened to an upload since somebody last looked: answers, lists, and ways that have ended.

Each is booked once: in ``whereabouts`` what is stored, in ``plan`` what failed, was refused or lost. What is
to be done about it is the upload's business.
"""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import NoSpace, NoSuchShare, ServerError, WrongSecret
from pipegrid.transfer.put.allocations import RoomAnswer
from pipegrid.transfer.put.parts import Parts
from pipegrid.transfer.put.sharestate import State, is_unexplained
from pipegrid.transfer.put.shareway import ShareWay
from pipegrid.wire.messages import Allocation


class News:
    """
    The news of one upload.

    Args:
        parts: of the upload: whom it is heard from, and where it is booked.
    """

    def __init__(self, clock: IReactorTime, parts: Parts) -> None:
        self._clock = clock
        self._plan = parts.plan
        self._ways = parts.ways
        self._allocations = parts.allocations
        self._refusals = parts.refusals
        self._asking = parts.asking
        self._where = parts.where
        self._others_uploading = self._aborted = False

    @property
    def contended(self) -> bool:
        """Whether somebody else seems to be storing the file at the same time."""
        return self._others_uploading or self._aborted or self._refusals.contended

    def take(self) -> bool:
        """Take in all that has happened; returns whether anything has."""
        news = self.take_answers()
        for peer, there in self._refusals.take_lists():
            self._where.found_at(peer, there)
            news = True
        ended = self._ways.take_ended(self._clock.seconds())
        for way in ended:
            self._ended(way)
        return news or bool(ended)

    def take_answers(self) -> bool:
        """Take in what servers have said to allocations; returns whether any has."""
        answers = self._allocations.take_answers()
        if answers:
            self._asking.answered(self._clock.seconds(), len(answers))
        for answer in answers:
            if not isinstance(answer.result, Failure):
                self._allocated(answer.result, answer)
            elif answer.result.check(ServerError, CancelledError):
                self._ways.peer_failed(answer.peer, answer.result.value)
            else:
                answer.result.raiseException()
        return bool(answers)

    def _allocated(self, allocation: Allocation, answer: RoomAnswer) -> None:
        peer = answer.peer
        there = self._where.found_at(peer, allocation.already_have, answer.sent_before)
        for way in self._ways.open:
            if way.peer is peer and way.share_number in answer.numbers:
                way.last_sign = self._clock.seconds()
                if way.share_number in there:
                    way.close(State.STORED)
                # No room, or an unfinished upload: perhaps our own, which the writes then resume.
                way.granted = way.share_number in allocation.allocated

    def _ended(self, way: ShareWay) -> None:
        peer, number = way.peer, way.share_number
        if way.state is State.STORED:
            self._where.stored(peer, number)
        elif way.state is State.LOST:
            # Whoever stores the same with the same secrets may have ended it, as after a failure of theirs.
            self._aborted = self._aborted or isinstance(way.error, NoSuchShare)
            self._plan.lost(number, peer)
        elif way.state is State.REFUSED:
            if isinstance(way.error, WrongSecret):
                self._others_uploading = True
            elif is_unexplained(way.state, way.error) or isinstance(way.error, NoSpace):
                self._refusals.note(peer, number, way.error)
            self._plan.refused(number, peer)
        elif way.state is State.FAILED:
            self._plan.failed(peer)
