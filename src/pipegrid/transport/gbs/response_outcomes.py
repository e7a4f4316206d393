"""The meaning of a server's response: the value, or the error of the contract that the response means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    QuotaReached,
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
from pipegrid.wire import gbs_bundles, gbs_cbor_bodies, gbs_paths_headers
from pipegrid.wire.gbs_bundles import BundledAnswer, BundledRead, BundledUpload
from pipegrid.wire.storage_messages import (
    Allocation,
    Reads,
    ReleaseAnswers,
    ServerVersion,
    SlotResult,
    WriteAnswer,
)

if TYPE_CHECKING:
    from pipegrid.transport.surveys import Surveyed
    from pipegrid.wire.gbs_surveys_releases import Question

# Modules for surveys and slots are imported when first used: a put or a get uses none of them.

T = TypeVar("T")

WRONG_SWISSNUM = b"Wrong Authorization header"
OVER_QUOTA = b"the quota"
_EXCERPT_CHARACTERS = 120


class GbsAnswers:
    """
    Interprets the responses of one server.

    The methods are pure functions of status, headers and body. The meaning of a status depends on the
    request. 401 is a wrong swissnum or a wrong upload secret; the response's text distinguishes them. 404 is
    a missing share or an unknown path. 416 and 500 as responses to a write mean that the range is outside of
    the share, or that the disk has failed.

    All methods raise ``ServerError``s that name the server.

    Source: Tahoe-LAFS's ``http-storage-node-protocol.rst``, and how its server 1.20 behaves.

    Args:
        server: the server's name for messages.
    """

    def __init__(self, server: str) -> None:
        self._server = server

    # One method for each request.

    def version(self, answer: RawResponse) -> ServerVersion:
        """Return the server's version and limits."""
        return self._unpack_ok(gbs_cbor_bodies.unpack_version, answer, "a question for its version")

    def allocation(self, answer: RawResponse) -> Allocation:
        """Return which shares the server has, and for which shares it has allocated space."""
        if answer.status != 200:
            raise self.refused_allocation(answer.status, answer.body)
        return self._unpack(gbs_cbor_bodies.unpack_allocation, answer, "an allocation")

    def refused_allocation(self, status: int, body: bytes = b"") -> ServerError:
        """Return the error that the status of a refused allocation means."""
        if status == 507:
            return self._over_quota()
        return self._refusal(status, body, "an allocation")

    def _over_quota(self) -> QuotaReached:
        server = self._server
        return QuotaReached(
            f"{server} has no space: its quota is used up; use another server", server
        )

    def write_result(self, answer: RawResponse, share_number: int, upto: int) -> WriteAnswer:
        """Return the result of a write whose range ends at byte ``upto`` of the share."""
        status = answer.status
        if status == 201 or status == 200:
            return self._unpack(gbs_cbor_bodies.unpack_required, answer, "a write", status == 201)
        raise self.refused_write(status, share_number, upto, answer.body)

    def refused_write(
        self, status: int, share_number: int, upto: int, body: bytes = b""
    ) -> ServerError:
        """
        Return the error that the status means for a refused write whose range ends at byte ``upto`` of the
        share.
        """
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
        """Return the results of the uploads in a bundle whose response has status 200."""
        return self._unpack(gbs_bundles.unpack_answers, answer, "a bundle", uploads)

    def survey(
        self, answer: RawResponse, questions: Sequence[Question]
    ) -> list[Surveyed | ServerError]:
        """Return the results of the questions in a survey."""
        from pipegrid.transport.surveys import Surveyed
        from pipegrid.wire import gbs_surveys_releases

        answers = self._unpack_ok(
            gbs_surveys_releases.unpack_survey_answers, answer, "a survey", questions
        )
        outcomes: list[Surveyed | ServerError] = []
        for each in answers:
            if isinstance(each, int):
                outcomes.append(self._refusal(each, b"", "a question for shares"))
                continue
            status = each.lease
            no_lease = None
            if status not in (gbs_surveys_releases.LEASE_NOT_ASKED, 200, 204, 404):
                no_lease = self._refused_lease(status)
            # Status 404: the shares were removed after they were listed.
            numbers = frozenset() if status == 404 else each.numbers
            samples = tuple([one if isinstance(one, bytes) else b"" for one in each.samples])
            outcomes.append(Surveyed(numbers, status in (200, 204), no_lease, samples))
        return outcomes

    def released(self, answer: RawResponse, count: int) -> ReleaseAnswers:
        """Return the results of ``count`` releases of leases."""
        from pipegrid.wire import gbs_surveys_releases

        return self._unpack_ok(
            gbs_surveys_releases.unpack_release_answers, answer, "a release of leases", count
        )

    def bundled_reads(
        self, answer: RawResponse, reads: Sequence[BundledRead]
    ) -> list[bytes | ServerError]:
        """Return the results of the reads in a bundle."""
        unpack = gbs_bundles.unpack_read_answers
        answers = self._unpack_ok(unpack, answer, "a bundle of reads", reads)
        return [
            one if isinstance(one, bytes) else self._refused_read(one, b"", read.share_number)
            for one, read in zip(answers, reads, strict=True)
        ]

    def _refused_read(self, status: int, body: bytes, share_number: int) -> ServerError:
        if status == 404:
            return no_share(self._server, share_number)
        return self._refusal(status, body, "a read", share_number)

    def aborted(self, answer: RawResponse, share_number: int, repeated: bool) -> None:
        """
        Return without an error if an upload was aborted. A repeated abort that finds no upload also
        succeeded: an earlier attempt has aborted it.
        """
        if answer.status == 200 or (repeated and answer.status == 404):
            return
        if answer.status in (404, 405):
            raise no_upload(self._server, share_number)
        raise self._refusal(answer.status, answer.body, "an abort", share_number)

    def shares(self, answer: RawResponse) -> frozenset[int]:
        """Return the numbers of the shares that the server has."""
        return self._unpack_ok(gbs_cbor_bodies.unpack_shares, answer, "a question for shares")

    def data(self, answer: RawResponse, share_number: int, offset: int, length: int) -> bytes:
        """Return the bytes of a read whose whole response is in memory."""
        found = self.range(answer, share_number, offset, length)
        if len(answer.body) != found - offset:
            what = f"{len(answer.body)} bytes where {found - offset} were announced"
            raise nonsense(self._server, "a read", what)
        return answer.body

    def range(self, answer: RawResponse, share_number: int, offset: int, length: int) -> int:
        """
        Return the offset in the share at which the bytes of a read's response end; the bytes begin at
        ``offset``.
        """
        if answer.status == 206:
            value = answer.headers.get(b"content-range", b"")
            if value == b"bytes %d-%d/*" % (offset, offset + length - 1):
                return offset + length
            try:
                begin, end = gbs_paths_headers.parse_content_range(value)
            except ValueError as error:
                raise nonsense(self._server, "a read", str(error)) from error
            if begin != offset or not offset < end <= offset + length:
                asked = f"{offset} to {offset + length} were asked for"
                raise nonsense(self._server, "a read", f"bytes {begin} to {end} where {asked}")
            return end
        if answer.status == 204:
            return offset
        raise self._refused_read(answer.status, answer.body, share_number)

    def slot_result(self, answer: RawResponse, reads: Reads, limit_bytes: int) -> SlotResult:
        """
        Return the result of a read-test-write, after checking that each share has one piece of data for each
        requested read.
        """
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
            raise self._no_space(answer.body)
        if answer.status == 413:
            raise ServerRefused(f"{server} takes no change of that size; write less", server)
        raise self._refusal(answer.status, answer.body, "a read-test-write")

    def lease_added(self, answer: RawResponse) -> None:
        """Return without an error if a lease was added."""
        if answer.status == 404:
            raise nothing_to_lease(self._server)
        if answer.status not in (200, 204):
            raise self._refused_lease(answer.status, answer.body)

    def _refused_lease(self, status: int, body: bytes = b"") -> ServerError:
        return self._no_space(body) if status == 507 else self._refusal(status, body, "a lease")

    def _no_space(self, body: bytes) -> NoSpace:
        if body.startswith(OVER_QUOTA):
            return self._over_quota()
        return NoSpace(f"{self._server} has no space; use another server", self._server)

    def advised(self, answer: RawResponse, share_number: int) -> None:
        """Return without an error if an advisory was accepted."""
        if answer.status == 404:
            raise no_share(self._server, share_number)
        if answer.status != 200:
            raise self._refusal(answer.status, answer.body, "a complaint", share_number)

    # Errors.

    def too_much(self, wanted: int) -> ServerProtocolError:
        """Return the error for a response with more bytes than it announced."""
        return nonsense(self._server, "a read", f"more than the {wanted} bytes that it announced")

    def _unpack(
        self, unpack: Callable[..., T], answer: RawResponse, question: str, *facts: object
    ) -> T:
        try:
            return unpack(answer.body, *facts)
        except ValueError as error:
            raise nonsense(self._server, question, str(error)) from error

    def _unpack_ok(
        self, unpack: Callable[..., T], answer: RawResponse, question: str, *facts: object
    ) -> T:
        """Unpack a response with status 200; raise the error that any other status means."""
        if answer.status != 200:
            raise self._refusal(answer.status, answer.body, question)
        return self._unpack(unpack, answer, question, *facts)

    def _refusal(
        self, status: int, body: bytes, question: str, share_number: int | None = None
    ) -> ServerError:
        """Return the error for a status that is not a regular response to this request."""
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
