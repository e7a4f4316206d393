"""
What a server's answer means: a value, or the one error of the contract that is true of it.

Pure functions of status, headers and body. A status means different things to different requests: 401 is the
wrong swissnum or the wrong upload secret, told apart by the text; 404 is a share that is not there, or
a path that a storage server would know; 416 and 500 to a write are a range outside of the share.

Source: the format reference, storage protocols, sections 1.4, 1.7 and 1.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    ServerError,
    ServerProtocolError,
    ServerRefused,
    WrongSecret,
)
from pipegrid.http11.exchange import RawResponse
from pipegrid.transport.interface import (
    excerpt,
    fits_reads,
    no_share,
    no_upload,
    nonsense,
    nothing_to_lease,
    wrong_swissnum,
)
from pipegrid.wire import gbs_bundles, gbs_messages
from pipegrid.wire.gbs_bundles import BundledAnswer, BundledUpload
from pipegrid.wire.messages import Allocation, Reads, ServerVersion, SlotResult, WriteAnswer

if TYPE_CHECKING:
    from pipegrid.transport.surveys import Surveyed
    from pipegrid.wire.gbs_surveys import Question, SurveyAnswer

# Surveys and slots are imported by the first of their kind: a put or a get has none.

T = TypeVar("T")

WRONG_SWISSNUM = b"Wrong Authorization header"
_EXCERPT_CHARACTERS = 120


class GbsAnswers:
    """
    Understands the answers of one server.

    All methods raise ``ServerError``s that name it.

    Args:
        server: what a person calls it.
    """

    def __init__(self, server: str) -> None:
        self._server = server

    # One for each request.

    def version(self, answer: RawResponse) -> ServerVersion:
        """What the server says of itself."""
        if answer.status != 200:
            raise self._refusal(answer.status, answer.body, "a question for its version")
        return self._unpack(gbs_messages.unpack_version, answer, "a question for its version")

    def allocation(self, answer: RawResponse) -> Allocation:
        """Which shares the server has, and for which it has made room."""
        if answer.status != 200:
            raise self.refused_allocation(answer.status, answer.body)
        return self._unpack(gbs_messages.unpack_allocation, answer, "an allocation")

    def refused_allocation(self, status: int, body: bytes = b"") -> ServerError:
        """The error for the status of an allocation that was refused."""
        if status == 507:
            return NoSpace(f"{self._server} has no space; use another server", self._server)
        return self._refusal(status, body, "an allocation")

    def write_result(self, answer: RawResponse, share_number: int, upto: int) -> WriteAnswer:
        """How a write, up to byte ``upto`` of the share, has ended."""
        status = answer.status
        if status == 201 or status == 200:
            return self._unpack(gbs_messages.unpack_required, answer, "a write", status == 201)
        raise self.refused_write(status, share_number, upto, answer.body)

    def refused_write(
        self, status: int, share_number: int, upto: int, body: bytes = b""
    ) -> ServerError:
        """The error for the status of a write, up to byte ``upto`` of the share, that was refused."""
        server = self._server
        if status == 404:
            return no_upload(self._server, share_number)
        if status == 409:
            return ConflictingWrite(
                f"{server} has other bytes of share {share_number} already; abort that upload, or"
                " wait half an hour for its end",
                server,
            )
        if status == 507:
            return NoSpace(f"{server} has no more space; use another server", server)
        if status == 416 or status >= 500:
            return ServerRefused(
                f"{server} did not take bytes of share {share_number} up to {upto} (status"
                f" {status}); it allocated less, or its disk failed: use another server",
                server,
            )
        return self._refusal(status, body, "a write", share_number)

    def bundle(self, answer: RawResponse, uploads: Sequence[BundledUpload]) -> list[BundledAnswer]:
        """What became of the uploads of a bundle that the server has looked at (200)."""
        return self._unpack(gbs_bundles.unpack_answers, answer, "a bundle", uploads)

    def survey(
        self, answer: RawResponse, questions: Sequence[Question]
    ) -> list[Surveyed | ServerError]:
        """What was answered to the questions of a survey."""
        from pipegrid.wire import gbs_surveys

        if answer.status != 200:
            raise self._refusal(answer.status, answer.body, "a survey")
        answers = self._unpack(gbs_surveys.unpack_answers, answer, "a survey", questions)
        return [self._surveyed(each) for each in answers]

    def _surveyed(self, answer: SurveyAnswer | int) -> Surveyed | ServerError:
        from pipegrid.transport.surveys import Surveyed
        from pipegrid.wire.gbs_surveys import LEASE_NOT_ASKED

        if isinstance(answer, int):
            return self._refusal(answer, b"", "a question for shares")
        status = answer.lease
        no_lease = None
        if status not in (LEASE_NOT_ASKED, 200, 204, 404):
            no_lease = self._refusal(status, b"", "a lease")
        return Surveyed(
            answer.numbers,
            status in (200, 204),
            no_lease,
            tuple([one if isinstance(one, bytes) else b"" for one in answer.samples]),
        )

    def aborted(self, answer: RawResponse, share_number: int, repeated: bool) -> None:
        """Whether an upload is gone; a repeated abort that finds none has done its work before."""
        if answer.status == 200 or (repeated and answer.status == 404):
            return
        if answer.status in (404, 405):
            raise no_upload(self._server, share_number)
        raise self._refusal(answer.status, answer.body, "an abort", share_number)

    def shares(self, answer: RawResponse) -> frozenset[int]:
        """The numbers of the shares that the server has."""
        if answer.status != 200:
            raise self._refusal(answer.status, answer.body, "a question for shares")
        return self._unpack(gbs_messages.unpack_shares, answer, "a question for shares")

    def data(self, answer: RawResponse, share_number: int, offset: int, length: int) -> bytes:
        """The bytes of a read that was collected."""
        found = self.range(answer, share_number, offset, length)
        if len(answer.body) != found - offset:
            raise nonsense(
                self._server,
                "a read",
                f"{len(answer.body)} bytes where {found - offset} were announced",
            )
        return answer.body

    def range(self, answer: RawResponse, share_number: int, offset: int, length: int) -> int:
        """Where the bytes end that a read's answer brings; they begin at ``offset``."""
        if answer.status == 206:
            value = answer.headers.get(b"content-range", b"")
            if value == b"bytes %d-%d/*" % (offset, offset + length - 1):
                return offset + length
            try:
                begin, end = gbs_messages.parse_content_range(value)
            except ValueError as error:
                raise nonsense(self._server, "a read", str(error)) from error
            if begin != offset or not offset < end <= offset + length:
                raise nonsense(
                    self._server,
                    "a read",
                    f"bytes {begin} to {end} where {offset} to {offset + length} were asked for",
                )
            return end
        if answer.status == 204:
            return offset
        if answer.status == 404:
            raise no_share(self._server, share_number)
        raise self._refusal(answer.status, answer.body, "a read", share_number)

    def slot_result(self, answer: RawResponse, reads: Reads, limit_bytes: int) -> SlotResult:
        """What a read-test-write has done and found; of each share exactly what was asked for."""
        from pipegrid.wire import gbs_mutable

        server = self._server
        if answer.status == 200:
            what = "a read-test-write"
            result = self._unpack(gbs_mutable.unpack_answer, answer, what, limit_bytes)
            if not fits_reads(result.data, reads):
                raise nonsense(self._server, "a read-test-write", "other reads than were asked for")
            return result
        if answer.status == 401 and not answer.body.startswith(WRONG_SWISSNUM):
            raise WrongSecret(
                f"{server} has this file under another write enabler; it was copied there from another "
                "server, or made by another client: repair it from another client, or delete it there",
                server,
            )
        if answer.status == 507:
            raise NoSpace(f"{server} has no space; use another server", server)
        if answer.status == 413:
            raise ServerRefused(f"{server} takes no change of that size; write less", server)
        raise self._refusal(answer.status, answer.body, "a read-test-write")

    def lease_added(self, answer: RawResponse) -> None:
        """Whether a lease was added."""
        if answer.status == 404:
            raise nothing_to_lease(self._server)
        if answer.status not in (200, 204):
            raise self._refusal(answer.status, answer.body, "a lease")

    def advised(self, answer: RawResponse, share_number: int) -> None:
        """Whether a complaint was taken."""
        if answer.status == 404:
            raise no_share(self._server, share_number)
        if answer.status != 200:
            raise self._refusal(answer.status, answer.body, "a complaint", share_number)

    # Errors.

    def too_much(self, wanted: int) -> ServerProtocolError:
        """More bytes come than were asked for."""
        return nonsense(self._server, "a read", f"more than the {wanted} bytes that it announced")

    def _unpack(
        self, unpack: Callable[..., T], answer: RawResponse, question: str, *facts: object
    ) -> T:
        try:
            return unpack(answer.body, *facts)
        except ValueError as error:
            raise nonsense(self._server, question, str(error)) from error

    def _refusal(
        self, status: int, body: bytes, question: str, share_number: int | None = None
    ) -> ServerError:
        """The error for a status that is no proper answer to this request."""
        server = self._server
        if status == 401:
            if body.startswith(WRONG_SWISSNUM):
                return wrong_swissnum(server, "NURL")
            if share_number is not None:
                return WrongSecret(
                    f"{server} has share {share_number} under another secret; another client is uploading it",
                    server,
                )
        if status >= 500:
            return ServerRefused(
                f"{server} failed at {question} (status {status}); its operator can see why",
                server,
                may_have_happened=True,
            )
        text = excerpt(
            body[: 4 * _EXCERPT_CHARACTERS].decode("utf-8", "replace"), _EXCERPT_CHARACTERS
        )
        return nonsense(self._server, question, f"status {status}" + (f" ({text})" if text else ""))
