"""Share containers, byte for byte as the reference wrote them."""

from __future__ import annotations

import base64
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.storage import share_file
from pipegrid.wire.storage_messages import LeaseSecrets
from tests import vectors


def immutable_cases() -> list[dict[str, Any]]:
    """Return the recorded immutable containers."""
    cases = [c for c in vectors.load("containers")["cases"] if c["kind"] == "immutable"]
    assert cases
    return cases


def record(version: int, lease: dict[str, Any]) -> share_file.LeaseRecord:
    """Return the stored form of a recorded lease."""
    return share_file.LeaseRecord(
        lease["owner"],
        share_file.stored_secret(version, bytes.fromhex(lease["renew"])),
        share_file.stored_secret(version, bytes.fromhex(lease["cancel"])),
        lease["expires"],
    )


class RecordedContainerTests(SynchronousTestCase):
    """The reference's files."""

    def test_containers_are_packed_byte_for_byte(self) -> None:
        """Header, share and leases, put together, are the recorded file."""
        for case in immutable_cases():
            share = bytes.fromhex(case["share_hex"])
            packed = (
                share_file.pack_header(len(share), len(case["leases"]), case["version"])
                + share
                + b"".join(record(case["version"], lease).pack() for lease in case["leases"])
            )
            self.assertEqual(packed, base64.b64decode(case["file_base64"]), case["name"])
            self.assertEqual(
                share_file.container_bytes(len(share), len(case["leases"])), len(packed)
            )

    def test_containers_are_parsed(self) -> None:
        """Version, share length and leases are read back from the recorded file."""
        for case in immutable_cases():
            file = base64.b64decode(case["file_base64"])
            header = share_file.parse_header(file)
            self.assertEqual(header.version, case["version"])
            self.assertEqual(
                share_file.share_bytes(header, len(file)), len(case["share_hex"]) // 2, case["name"]
            )
            leases = share_file.parse_leases(file[share_file.leases_offset(header, len(file)) :])
            self.assertEqual(leases, tuple(record(case["version"], x) for x in case["leases"]))

    def test_a_lease_is_found_by_its_renew_secret(self) -> None:
        """In both versions the clear secret finds the lease, and another one none."""
        for case in immutable_cases():
            version = case["version"]
            data = b"".join(record(version, lease).pack() for lease in case["leases"])
            for index, lease in enumerate(case["leases"]):
                renew = bytes.fromhex(lease["renew"])
                self.assertEqual(find(version, data, renew), index)
            self.assertIsNone(find(version, data, b"?" * 32))


def find(version: int, records: bytes, renew: bytes) -> int | None:
    """Return the index of a lease."""
    stored = share_file.stored_secret(version, renew)
    return share_file.RECORDS.find(records, stored, version > 1)


class ContainerTests(SynchronousTestCase):
    """What no recorded file shows."""

    def test_a_lease_lasts_31_days(self) -> None:
        """A new lease expires 31 days from now."""
        lease = share_file.make_lease(2, 0, LeaseSecrets(b"r" * 32, b"c" * 32), 1000.9)
        self.assertEqual(lease.expires, 1000 + 31 * 86400)

    def test_numbers_saturate(self) -> None:
        """A share beyond 4 GiB, or an expiry beyond 2106, is written as 2^32 - 1."""
        self.assertEqual(share_file.pack_header(1 << 40, 1)[4:8], b"\xff" * 4)
        lease = share_file.LeaseRecord(0, b"r" * 32, b"c" * 32, 1 << 33)
        self.assertEqual(lease.pack()[-4:], b"\xff" * 4)

    def test_the_length_in_the_header_is_not_relied_on(self) -> None:
        """Whatever bytes 4 to 8 say, the share's length follows from the file's; but see ``test_leases``."""
        file = bytearray(share_file.pack_header(5, 1))
        file[4:8] = b"\xff\x00\xff\x00"
        self.assertEqual(
            share_file.share_bytes(share_file.parse_header(bytes(file)), 12 + 5 + 72), 5
        )

    def test_other_files_are_no_containers(self) -> None:
        """Short files, mutable containers and unknown versions are told apart."""
        for wrong in (b"", b"\0\0\0\2\0\0\0\0", b"Tahoe mutable container v2\n", b"\0\0\0\3" * 3):
            self.assertRaises(ValueError, share_file.parse_header, wrong)
        header = share_file.parse_header(share_file.pack_header(0, 2))
        self.assertRaises(ValueError, share_file.share_bytes, header, 12 + 143)
        self.assertRaises(ValueError, share_file.parse_leases, b"x" * 71)

    def test_secrets_do_not_show(self) -> None:
        """A lease's repr has no secret in it."""
        lease = share_file.LeaseRecord(0, b"r" * 32, b"c" * 32, 1)
        self.assertNotIn("rrr", repr(lease))
        self.assertNotIn("ccc", repr(lease))
