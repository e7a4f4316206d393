"""GBS requests as bytes, and limits and timeouts for one server."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from pipegrid.core import base32
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.exchange import ConsumerChoice, RawRequest
from pipegrid.wire import gbs_bundles, gbs_cbor_bodies, gbs_paths_headers
from pipegrid.wire.gbs_bundles import BundledRead, BundledUpload
from pipegrid.wire.server_address import Nurl
from pipegrid.wire.storage_messages import (
    Changes,
    LeaseSecrets,
    Numbers,
    Pieces,
    Reads,
    SlotSecrets,
    UploadSecrets,
)

if TYPE_CHECKING:
    from pipegrid.wire.gbs_surveys_releases import Question
    from pipegrid.wire.storage_messages import LeaseReleases


# GBS requests as bytes, ready to be sent.
#
# A small put is two requests of half a kilobyte around a share of the same size. So parts that all requests
# have (host, authorization) or many requests have (the storage index, the secrets of a file) are encoded
# once.
#
# Defaults are not sent: messages are CBOR unless a header says otherwise, and servers refuse an ``Accept``
# header that is not literally their type.
#
# Source: Tahoe-LAFS's ``http-storage-node-protocol.rst``, and how its server 1.20 behaves.

ANSWER_BYTES = 280
"""
Estimated size of a response without share data: head, framing and a message about one or a few shares.
Tahoe-LAFS sends about 200 bytes, and TLS adds some tens. So the responses to a hundred allocations, each with
a write, fit into a connection's limit for outstanding responses (60 KB).
"""
ANSWER_UPLOAD_BYTES = 24
"""Estimated size of a bundle's response, for each upload of one or two shares."""
EXPECTED_SLOT_SHARES = 2
"""
A server usually has at most this many shares of a file. So the response to a read-test-write is estimated as
this many times the bytes read from one share.
"""
SLOWEST_BYTES_PER_S = 2000
"""Lowest rate allowed for a request's body: bytes that the kernel accepted may be in flight for long."""
MAX_SLOT_ANSWER_BYTES = 64 << 20
"""Lowest rate allowed for the body of a read-test-write; its timeout grows with the body's size."""
ANSWER_QUESTION_BYTES = 12
"""Estimated size of a survey's response, for each file with a few shares, without samples."""
MAX_MESSAGE_BYTES = gbs_cbor_bodies.MAX_ANSWER_BYTES
MAX_REFUSAL_BYTES = 16 * 1024
"""The maximum size of an error response; the beginning of its text is shown to the user."""

_SECRET = gbs_paths_headers.SECRET.encode("ascii") + b": "
_UPLOAD = _SECRET + gbs_paths_headers.UPLOAD_SECRET.encode("ascii") + b" "
_RENEW = _SECRET + gbs_paths_headers.RENEW_SECRET.encode("ascii") + b" "
_ENABLER = _SECRET + gbs_paths_headers.WRITE_ENABLER.encode("ascii") + b" "
_CANCEL = _SECRET + gbs_paths_headers.CANCEL_SECRET.encode("ascii") + b" "
_IMMUTABLE = b"/storage/v1/immutable/"
_MUTABLE = b"/storage/v1/mutable/"
_LEASE = b"/storage/v1/lease/"
_BUNDLE = b"POST " + gbs_paths_headers.BUNDLE_PATH.encode("ascii")
_READ_BUNDLE = b"POST " + gbs_paths_headers.READ_BUNDLE_PATH.encode("ascii")
_RELEASE_LEASES = b"POST " + gbs_paths_headers.RELEASE_LEASES_PATH.encode("ascii")
_SURVEY = b"POST " + gbs_paths_headers.SURVEY_PATH.encode("ascii")


@lru_cache(maxsize=4096)
def _index_text(storage_index: bytes) -> bytes:
    return base32.encode(storage_index).encode("ascii")


@lru_cache(maxsize=4096)
def _upload_line(upload_secret: bytes) -> bytes:
    return _UPLOAD + b64encode(upload_secret) + b"\r\n"


def _lease_lines(lease: LeaseSecrets) -> bytes:
    return _RENEW + b64encode(lease.renew) + b"\r\n" + _CANCEL + b64encode(lease.cancel) + b"\r\n"


def _kind(mutable: bool) -> bytes:
    return _MUTABLE if mutable else _IMMUTABLE


class GbsRequests:
    """
    Builds the requests to one server.

    Args:
        timeout_s: longest time without activity of the server while a response is outstanding.
    """

    def __init__(self, nurl: Nurl, timeout_s: float) -> None:
        host = f"[{nurl.host}]" if ":" in nurl.host else nurl.host
        place = f"{host}:{nurl.port}".encode("ascii")
        authorization = gbs_paths_headers.authorization(nurl.swissnum)
        self._timeout_s = timeout_s
        # The part of each request's head directly after the path; the same for all requests to this server.
        self._common = b" HTTP/1.1\r\nHost: %s\r\nAuthorization: %s\r\n" % (place, authorization)

    def version(self) -> RawRequest:
        """Return a request for the server's version and limits."""
        return self._message(b"GET " + gbs_paths_headers.VERSION_PATH.encode("ascii"))

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> RawRequest:
        return self._message(
            b"POST " + _IMMUTABLE + _index_text(storage_index),
            _lease_lines(secrets.lease) + _upload_line(secrets.upload),
            gbs_cbor_bodies.pack_allocate(share_numbers, share_bytes),
        )

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        release: Callable[[], None] | None = None,
    ) -> RawRequest:
        """
        Return the request that writes pieces, joined in order, from an offset on; at least one byte in total.
        ``release``: see ``StorageServer.write``.
        """
        length = sum(map(len, data))
        head = b"PATCH %s%s/%d%s%sContent-Range: bytes %d-%d/*\r\nContent-Length: %d\r\n\r\n" % (
            _IMMUTABLE,
            _index_text(storage_index),
            share_number,
            self._common,
            _upload_line(upload_secret),
            offset,
            offset + length - 1,
            length,
        )
        return RawRequest(
            head, data, True, ANSWER_BYTES, self._timeout_s, MAX_MESSAGE_BYTES, release=release
        )

    def bundle(self, uploads: Sequence[BundledUpload]) -> RawRequest:
        """Return the request that allocates and writes many small shares."""
        pieces = gbs_bundles.bundle_pieces(uploads)
        return self._message(_BUNDLE, b"", *pieces, more_bytes=len(uploads) * ANSWER_UPLOAD_BYTES)

    def survey(self, questions: Sequence[Question]) -> RawRequest:
        """Return one request that asks which shares of many files exist, and for samples of these shares."""
        from pipegrid.wire import gbs_surveys_releases

        body = gbs_surveys_releases.pack_survey(questions)
        more_bytes = len(questions) * ANSWER_QUESTION_BYTES
        more_bytes += sum(sample.length for each in questions for sample in each.samples)
        return self._message(_SURVEY, b"", body, more_bytes=more_bytes)

    def read_bundle(self, reads: Sequence[BundledRead]) -> RawRequest:
        """Return one request that reads the beginnings of many small shares."""
        body = gbs_bundles.pack_reads(reads)
        more_bytes = sum(gbs_bundles.READ_ANSWER_BYTES + each.length for each in reads)
        return self._message(_READ_BUNDLE, b"", body, more_bytes=more_bytes)

    def release_leases(self, request: LeaseReleases) -> RawRequest:
        """Return one request that releases many leases."""
        from pipegrid.wire import gbs_surveys_releases

        body = gbs_surveys_releases.pack_releases(request)
        more_bytes = ANSWER_QUESTION_BYTES * len(request.releases)
        return self._message(_RELEASE_LEASES, b"", body, more_bytes=more_bytes)

    def abort(self, storage_index: bytes, share_number: int, upload_secret: bytes) -> RawRequest:
        """Return the request that aborts an unfinished share; the secret is its upload secret."""
        return self._message(
            b"PUT %s%s/%d/abort" % (_IMMUTABLE, _index_text(storage_index), share_number),
            _upload_line(upload_secret),
            b"",
        )

    def list_shares(self, storage_index: bytes, *, mutable: bool = False) -> RawRequest:
        return self._message(b"GET %s%s/shares" % (_kind(mutable), _index_text(storage_index)))

    def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads
    ) -> RawRequest:
        """Return the request that tests, reads and writes a slot; the data to write are not copied."""
        from pipegrid.wire import gbs_mutable

        body = gbs_mutable.pack_request_in_pieces(changes, reads)
        head = b"POST %s%s/read-test-write%s%s%s%s\r\nContent-Length: %d\r\n\r\n" % (
            _MUTABLE,
            _index_text(storage_index),
            self._common,
            _lease_lines(secrets.lease),
            _ENABLER,
            b64encode(secrets.write_enabler),
            size := sum(map(len, body)),
        )
        each = sum(length for _, length in reads)
        return RawRequest(
            head,
            body,
            True,  # idempotent; ``transport.interface`` explains this
            ANSWER_BYTES + EXPECTED_SLOT_SHARES * each,
            self._timeout_s + size / SLOWEST_BYTES_PER_S,
            self.slot_answer_bytes(reads),
        )

    @staticmethod
    def slot_answer_bytes(reads: Reads) -> int:
        """Return the maximum size of the response to a read-test-write with these reads."""
        each = sum(length + 16 for _, length in reads) + 16
        return min(
            MAX_MESSAGE_BYTES + gbs_cbor_bodies.MAX_SHARE_NUMBERS * each, MAX_SLOT_ANSWER_BYTES
        )

    def read(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        length: int,
        consumer_for: ConsumerChoice | None = None,
        *,
        mutable: bool = False,
    ) -> RawRequest:
        """
        Return the request that reads at least one byte of a share.

        Args:
            consumer_for: chooses a consumer, which gets the bytes as they arrive; None: the bytes are
                collected.
        """
        head = b"GET %s%s/%d%sRange: bytes=%d-%d\r\n\r\n" % (
            _kind(mutable),
            _index_text(storage_index),
            share_number,
            self._common,
            offset,
            offset + length - 1,
        )
        return RawRequest(
            head,
            (),
            True,
            # The server sends chunks of 64 KiB or less; the framing of each counts, too.
            ANSWER_BYTES + length + length // 2048,
            self._timeout_s,
            MAX_REFUSAL_BYTES if consumer_for is not None else max(length, MAX_REFUSAL_BYTES),
            consumer_for,
        )

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> RawRequest:
        """Return the request that adds or renews a lease."""
        return self._message(
            b"PUT " + _LEASE + _index_text(storage_index), _lease_lines(lease), b""
        )

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str, *, mutable: bool = False
    ) -> RawRequest:
        """Return the request that reports a corrupt share to the server's operator, with the reason."""
        return self._message(
            b"POST %s%s/%d/corrupt" % (_kind(mutable), _index_text(storage_index), share_number),
            b"",
            gbs_cbor_bodies.pack_corrupt(reason),
        )

    def _message(
        self, start: bytes, lines: bytes = b"", *body: bytes, more_bytes: int = 0
    ) -> RawRequest:
        """
        Return a request whose response is one message.

        Args:
            more_bytes: expected size of the response in addition to ``ANSWER_BYTES``.
        """
        head = start + self._common + lines
        if body:
            head += b"Content-Length: %d\r\n" % sum(map(len, body))
        return RawRequest(
            head + b"\r\n",
            [piece for piece in body if piece],
            True,  # idempotent; ``uploads`` interprets the response to a repetition
            ANSWER_BYTES + more_bytes,
            self._timeout_s,
            MAX_MESSAGE_BYTES,
        )


# Limits and timeouts for one server over HTTPS.


class GbsSettings(NamedTuple):
    """
    Limits and timeouts for one server.

    Attributes:
        connect_timeout_s: maximum time until a connection can be used, including TLS; see ``http11.dialer``.
        timeout_s: longest time without activity of the server, while a response is outstanding and not
            paused.
        time_limit_s: how long begun uploads wait for a lost server to return. A server's restart takes a few
            seconds; a put has its own time limit, so it does not wait longer than needed.
        max_read_connections: maximum number of connections for short responses. One nearly always suffices;
            others are opened when more bytes of responses are outstanding than one connection may have.
        max_streams: maximum number of streams at the same time; each has its own connection.
        max_waiting: maximum number of requests that wait for the uploads' connection, and the same number for
            the other connections; further requests fail at once.
        max_upload_bytes_in_flight: maximum number of bytes that are sent and unanswered. The callers' windows
            should be the effective limit, so this limit is larger than any of them; further bytes wait unsent
            in this client.
    """

    connect_timeout_s: float = 15.0
    timeout_s: float = 60.0
    time_limit_s: float = 20.0
    max_read_connections: int = 4
    max_streams: int = 6
    max_waiting: int = 10_000
    max_upload_bytes_in_flight: int = 128 << 20

    def limits(self, max_connections: int) -> Limits:
        """Return these limits as ``http11`` uses them."""
        return Limits(
            max_connections=max_connections,
            # Servers limit the bytes of requests, and so does this client; the number of requests may be
            # large.
            max_requests_in_flight=1000,
            max_request_bytes_in_flight=self.max_upload_bytes_in_flight,
            max_waiting=self.max_waiting,
            # Tahoe-LAFS servers are built on Twisted: all outstanding responses must fit into the server's
            # transport.
            max_response_budget_bytes=0,
            timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            close_timeout_s=1.0,
        )
