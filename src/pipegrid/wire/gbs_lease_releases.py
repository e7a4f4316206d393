"""
Releases of leases: many leases of one client in one request, an extension of GBS
(``docs/reference-lease-releases.md``).

Messages are CBOR; both ends check them, and raise ``ValueError``.
"""

from __future__ import annotations

from typing import Any

from pipegrid.core.hashes import Buffer
from pipegrid.wire import cbor
from pipegrid.wire.gbs_cbor_bodies import MAX_ANSWER_BYTES
from pipegrid.wire.storage_messages import (
    MAX_RELEASES,
    LeaseRelease,
    LeaseReleases,
    ReleaseAnswers,
    Released,
)

MAX_RELEASE_BYTES = 8 * 1024

_CANCEL_SECRET_BYTES = 32
_REQUEST_ITEMS = 3 + 3 * MAX_RELEASES
_ANSWER_ITEMS = 3 + 4 * MAX_RELEASES


def pack_releases(request: LeaseReleases) -> bytes:
    """Return a request of at most ``MAX_RELEASES``."""
    pairs = [[each.storage_index, each.cancel_secret] for each in request.releases]
    return cbor.dumps([request.since, pairs])


def unpack_releases(body: Buffer) -> LeaseReleases:
    """Return what a request asks for."""
    value = cbor.loads(body, MAX_RELEASE_BYTES, _REQUEST_ITEMS)
    since, pairs = cbor.expect_fields(value, 2, "the request")
    pairs = cbor.expect_list(pairs, "the releases", MAX_RELEASES)
    return LeaseReleases(
        cbor.expect_uint(since, "the time"), tuple(_unpack_release(each) for each in pairs)
    )


def _unpack_release(value: Any) -> LeaseRelease:
    index, secret = cbor.expect_fields(value, 2, "a release")
    what = "a lease cancel secret"
    return LeaseRelease(
        cbor.expect_index(index), cbor.expect_sized(secret, what, _CANCEL_SECRET_BYTES)
    )


def pack_answers(answers: ReleaseAnswers) -> bytes:
    """Return the answer to a request."""
    return cbor.dumps([answers.now, [_packed(each) for each in answers.results]])


def _packed(result: Released | int) -> Any:
    return result if isinstance(result, int) else list(result)


def unpack_answers(body: Buffer, count: int) -> ReleaseAnswers:
    """Return the answer to a request of this many releases."""
    value = cbor.loads(body, MAX_ANSWER_BYTES, _ANSWER_ITEMS)
    now, results = cbor.expect_fields(value, 2, "the answer")
    found = cbor.expect_answers(results, count, "releases")
    return ReleaseAnswers(
        cbor.expect_uint(now, "the server's time"), tuple(_unpack_result(each) for each in found)
    )


def _unpack_result(value: Any) -> Released | int:
    if type(value) is int:
        return cbor.expect_status(value)
    leases, kept, freed = cbor.expect_fields(value, 3, "a result")
    return Released(
        cbor.expect_uint(leases, "the number of leases"),
        cbor.expect_uint(kept, "the number of leases"),
        cbor.expect_uint(freed, "the freed bytes"),
    )
