"""
What strangers say to either end of GBS: each reader gives a value within its bounds, or its one error; and
what our own packer would make of that value is read back as the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from misc.fuzz.choices import Choices
from pipegrid.core import base32
from pipegrid.errors import UsageError
from pipegrid.wire import gbs_bundles, gbs_cbor_bodies, gbs_paths_headers, server_address
from pipegrid.wire.gbs_bundles import BundledAnswer, BundledUpload
from pipegrid.wire.storage_messages import Allocation, LeaseSecrets, ServerVersion, UploadSecrets

_SPKI = "A" * 42 + "E"
_SI = bytes(range(16))
_SECRETS = UploadSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"u" * 32)


def run(data: bytes) -> None:
    """Let the first byte say which reader gets the rest."""
    choices = Choices(data)
    choices.pick(_READERS)(choices)


def _version(choices: Choices) -> None:
    with suppress(ValueError):
        version = gbs_cbor_bodies.unpack_version(choices.rest())
        assert 0 <= version.max_share_bytes <= 1 << 64
        assert version.available_bytes is None or version.available_bytes >= 0
        assert gbs_cbor_bodies.unpack_version(gbs_cbor_bodies.pack_version(version)) == version


def _allocate(choices: Choices) -> None:
    data = choices.rest()
    with suppress(ValueError):
        wanted = gbs_cbor_bodies.unpack_allocate(data)
        assert len(wanted.share_numbers) <= gbs_cbor_bodies.MAX_SHARE_NUMBERS
        _check_numbers(wanted.share_numbers)
        assert 0 <= wanted.share_bytes < 1 << 64
        packed = gbs_cbor_bodies.pack_allocate(wanted.share_numbers, wanted.share_bytes)
        assert gbs_cbor_bodies.unpack_allocate(packed) == wanted


def _allocation(choices: Choices) -> None:
    with suppress(ValueError):
        allocation = gbs_cbor_bodies.unpack_allocation(choices.rest())
        _check_numbers(allocation.already_have)
        _check_numbers(allocation.allocated)
        assert (
            gbs_cbor_bodies.unpack_allocation(gbs_cbor_bodies.pack_allocation(allocation))
            == allocation
        )


def _required(choices: Choices) -> None:
    complete = choices.flag()
    with suppress(ValueError):
        result = gbs_cbor_bodies.unpack_required(choices.rest(), complete)
        assert result.complete is complete
        assert len(result.required) <= gbs_cbor_bodies.MAX_REQUIRED_RANGES
        assert all(0 <= begin < end < 1 << 64 for begin, end in result.required)
        assert (
            gbs_cbor_bodies.unpack_required(
                gbs_cbor_bodies.pack_required(result.required), complete
            )
            == result
        )


def _shares(choices: Choices) -> None:
    with suppress(ValueError):
        numbers = gbs_cbor_bodies.unpack_shares(choices.rest())
        _check_numbers(numbers)
        assert gbs_cbor_bodies.unpack_shares(gbs_cbor_bodies.pack_shares(numbers)) == numbers


def _corrupt(choices: Choices) -> None:
    with suppress(ValueError):
        reason = gbs_cbor_bodies.unpack_corrupt(choices.rest())
        assert reason
        assert gbs_cbor_bodies.unpack_corrupt(gbs_cbor_bodies.pack_corrupt(reason))


def _reason(choices: Choices) -> None:
    """What we complain about may hold anything that an error of ours may hold."""
    packed = gbs_cbor_bodies.pack_corrupt(choices.rest().decode("utf-8", "surrogateescape") * 20)
    assert len(packed) <= gbs_cbor_bodies.MAX_CORRUPT_BYTES
    assert gbs_cbor_bodies.unpack_corrupt(packed)


def _bundle(choices: Choices) -> None:
    with suppress(ValueError):
        uploads = gbs_bundles.unpack_bundle(choices.rest())
        assert len(uploads) <= gbs_bundles.MAX_UPLOADS
        for upload in uploads:
            assert len(upload.storage_index) == 16
            assert len(upload.secrets.lease.renew) == len(upload.secrets.lease.cancel) == 32
            assert 1 <= len(upload.secrets.upload) <= 64
            assert 0 <= upload.share_bytes < 1 << 64
            assert len(upload.share_numbers) <= gbs_cbor_bodies.MAX_SHARE_NUMBERS
            _check_numbers(frozenset(upload.share_numbers))
            _check_numbers(frozenset(upload.shares))
            assert upload.shares.keys() <= upload.share_numbers
            assert all(len(data) == upload.share_bytes > 0 for data in upload.shares.values())
            assert len(gbs_bundles.pack_bundle([upload])) - 1 <= gbs_bundles.upload_bytes(upload)
        assert gbs_bundles.unpack_bundle(gbs_bundles.pack_bundle(uploads)) == uploads


def _answers(choices: Choices) -> None:
    """Each of the first bytes says which of eight shares an upload had."""
    uploads = [_upload(choices.byte()) for _ in range(choices.below(4))]
    with suppress(ValueError):
        answers = gbs_bundles.unpack_answers(choices.rest(), uploads)
        assert len(answers) == len(uploads)
        for answer, upload in zip(answers, uploads, strict=True):
            if isinstance(answer.allocation, Allocation):
                _check_numbers(answer.allocation.already_have)
                _check_numbers(answer.allocation.allocated)
                _check_numbers(frozenset(answer.statuses))
                assert answer.statuses.keys() == upload.shares.keys()
            else:
                assert not answer.statuses
            statuses = [*answer.statuses.values()]
            if isinstance(answer.allocation, int):
                statuses.append(answer.allocation)
            assert all(type(status) is int and 200 <= status <= 599 for status in statuses)
        assert gbs_bundles.unpack_answers(gbs_bundles.pack_answers(answers), uploads) == answers


def _upload(mask: int) -> BundledUpload:
    shares = {number: b"x" for number in range(8) if mask >> number & 1}
    return BundledUpload(_SI, _SECRETS, 1, set(range(8)), shares)


def _check_numbers(numbers: frozenset[int]) -> None:
    assert type(numbers) is frozenset
    assert all(type(number) is int and 0 <= number < 1 << 64 for number in numbers)


def _path(choices: Choices) -> None:
    path = choices.rest().decode("latin-1")
    target = gbs_paths_headers.parse_path(path)
    if target is None:
        return
    spelt: dict[gbs_paths_headers.Resource, Callable[[], str]] = {
        gbs_paths_headers.Resource.VERSION: lambda: gbs_paths_headers.VERSION_PATH,
        gbs_paths_headers.Resource.BUNDLE: lambda: gbs_paths_headers.BUNDLE_PATH,
        gbs_paths_headers.Resource.ALLOCATE: lambda: gbs_paths_headers.allocate_path(
            target.storage_index
        ),
        gbs_paths_headers.Resource.SHARES: lambda: gbs_paths_headers.shares_path(
            target.storage_index
        ),
        gbs_paths_headers.Resource.LEASE: lambda: gbs_paths_headers.lease_path(
            target.storage_index
        ),
    }
    if target.resource in spelt:
        assert spelt[target.resource]() == path, "an address has two spellings"
    if target.resource not in (
        gbs_paths_headers.Resource.VERSION,
        gbs_paths_headers.Resource.BUNDLE,
    ):
        assert len(target.storage_index) == 16
    assert 0 <= target.share_number < 10**9


def _secrets(choices: Choices) -> None:
    required = choices.pick(
        (
            gbs_paths_headers.ALLOCATE_SECRETS,
            gbs_paths_headers.LEASE_SECRETS,
            gbs_paths_headers.UPLOAD_SECRETS,
            gbs_paths_headers.NO_SECRETS,
        )
    )
    with suppress(ValueError):
        secrets = gbs_paths_headers.parse_secrets(choices.rest().split(b"\n"), required)
        assert secrets.keys() == required
        assert (
            gbs_paths_headers.parse_secrets(gbs_paths_headers.secret_lines(secrets), required)
            == secrets
        )


def _range(choices: Choices) -> None:
    value = choices.rest()
    with suppress(ValueError):
        begin, end = gbs_paths_headers.parse_range(value)
        assert 0 <= begin < end
        assert gbs_paths_headers.parse_range(gbs_paths_headers.format_range(begin, end)) == (
            begin,
            end,
        )


def _content_range(choices: Choices) -> None:
    value = choices.rest()
    with suppress(ValueError):
        begin, end = gbs_paths_headers.parse_content_range(value)
        assert 0 <= begin < end
        formatted = gbs_paths_headers.format_content_range(begin, end)
        assert gbs_paths_headers.parse_content_range(formatted) == (begin, end)


def _nurl(choices: Choices) -> None:
    text = choices.rest().decode("utf-8", "surrogateescape")
    with suppress(UsageError):
        parsed = server_address.parse_nurl(text)
        assert server_address.parse_nurl(str(parsed)) == parsed
        assert len(parsed.spki_hash) == server_address.SPKI_HASH_BYTES
        assert 1 <= parsed.port <= 65535
        assert parsed.recognises(parsed.spki_hash)
        gbs_paths_headers.authorization(parsed.swissnum)


_READERS: tuple[Callable[[Choices], Any], ...] = (
    _version,
    _allocate,
    _allocation,
    _required,
    _shares,
    _corrupt,
    _path,
    _secrets,
    _range,
    _content_range,
    _nurl,
    _reason,
    _bundle,
    _answers,
)


def seeds() -> dict[str, bytes]:
    """Return a good message of each kind."""
    lease = {gbs_paths_headers.RENEW_SECRET: b"r" * 32, gbs_paths_headers.CANCEL_SECRET: b"c" * 32}
    upload = {gbs_paths_headers.UPLOAD_SECRET: b"u" * 32}

    stored = BundledAnswer(Allocation(frozenset({2}), frozenset({0, 1})), {0: 201, 2: 404})

    def lines(secrets: dict[str, bytes]) -> bytes:
        return b"\n".join(gbs_paths_headers.secret_lines(secrets))

    readers: dict[Callable[[Choices], Any], tuple[bytes, ...]] = {
        _version: (
            gbs_cbor_bodies.pack_version(ServerVersion(1 << 40, 5000, "x/1")),
            gbs_cbor_bodies.pack_version(ServerVersion(0, None, "")),
        ),
        _allocate: (gbs_cbor_bodies.pack_allocate({0, 1, 300}, 1000),),
        _allocation: (
            gbs_cbor_bodies.pack_allocation(Allocation(frozenset({1}), frozenset({2, 3}))),
        ),
        _required: (
            b"\1" + gbs_cbor_bodies.pack_required([]),
            b"\0" + gbs_cbor_bodies.pack_required([(0, 10), (20, 1 << 40)]),
        ),
        _shares: (
            gbs_cbor_bodies.pack_shares(frozenset()),
            gbs_cbor_bodies.pack_shares(frozenset({0, 255})),
        ),
        _corrupt: (gbs_cbor_bodies.pack_corrupt("a bad block"),),
        _path: (
            gbs_paths_headers.VERSION_PATH.encode(),
            gbs_paths_headers.BUNDLE_PATH.encode(),
            gbs_paths_headers.share_path(_SI, 3).encode(),
            gbs_paths_headers.abort_path(_SI, 3).encode(),
            f"/storage/v1/mutable/{base32.encode(_SI)}/read-test-write".encode(),
        ),
        _secrets: (b"\0" + lines(lease | upload), b"\1" + lines(lease), b"\2" + lines(upload)),
        _range: (gbs_paths_headers.format_range(5, 10),),
        _content_range: (gbs_paths_headers.format_content_range(5, 10), b"bytes 0-9/100"),
        _nurl: (
            f"pb://{_SPKI}@example.org:443/swiss#v=1".encode(),
            f"pb+tor://{_SPKI}@abc.onion:1/swiss#v=1".encode(),
            f"pb://{_SPKI}@[2001:db8::1]:443/swiss#v=1".encode(),
        ),
        _bundle: (
            gbs_bundles.pack_bundle([]),
            gbs_bundles.pack_bundle([_upload(0b101), _upload(0)]),
        ),
        _answers: (
            b"\2\x05\0" + gbs_bundles.pack_answers([stored, BundledAnswer(500, {})]),
            b"\0" + gbs_bundles.pack_answers([]),
        ),
        _reason: ("share 3 is damaged: \xe4 \U0001f4be".encode(),),
    }
    return {
        f"{reader.__name__.strip('_').replace('_', '-')}-{number}": bytes([index]) + data
        for index, reader in enumerate(_READERS)
        for number, data in enumerate(readers[reader])
    }
