"""Mutable containers, byte for byte as the reference wrote them, and their plans of writes."""

from __future__ import annotations

import base64
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.hashes import Buffer
from pipegrid.storage.mutable import slot_file
from pipegrid.storage.share_file import stored_secret
from pipegrid.wire.storage_messages import LeaseSecrets
from tests import vectors


def mutable_cases() -> list[dict[str, Any]]:
    """Return the recorded mutable containers."""
    cases = [c for c in vectors.load("containers")["cases"] if c["kind"] == "mutable"]
    assert cases
    return cases


def all_leases(file: bytes) -> tuple[slot_file.MutableLease, ...]:
    """Return the leases of a whole container, free slots too."""
    at = slot_file.parse_header(file).extra_offset
    count = slot_file.parse_count(file[at:])
    slots = file[slot_file.LEASES_OFFSET : slot_file.DATA_OFFSET]
    end = at + slot_file.COUNT_BYTES + count * slot_file.LEASE_BYTES
    assert len(file) >= end, "leases that end behind the file"
    return slot_file.parse_leases(slots + file[at + slot_file.COUNT_BYTES : end])


def share_data(file: bytes) -> bytes:
    """Return the data in a whole container."""
    header = slot_file.parse_header(file)
    return file[slot_file.DATA_OFFSET : slot_file.DATA_OFFSET + header.data_bytes]


class RecordedTests(SynchronousTestCase):
    """The reference's files."""

    def test_recorded_containers_are_understood(self) -> None:
        """Header, data and leases are read from the recorded files."""
        for case in mutable_cases():
            file = base64.b64decode(case["file_base64"])
            header = slot_file.parse_header(file)
            self.assertEqual(header.version, case["version"])
            self.assertEqual(header.node_id.hex(), case["nodeid"])
            self.assertEqual(header.write_enabler.hex(), case["write_enabler"])
            self.assertEqual(share_data(file).hex(), case["share_hex"], case["name"])
            found = [lease for lease in all_leases(file) if lease.owner]
            expected = [
                slot_file.MutableLease(
                    lease["owner"],
                    lease["expires"],
                    stored_secret(2, bytes.fromhex(lease["renew"])),
                    stored_secret(2, bytes.fromhex(lease["cancel"])),
                    bytes.fromhex(lease["nodeid"]),
                )
                for lease in case["leases"]
            ]
            self.assertEqual(found, expected, case["name"])
            self.assertEqual(file[:100], header.pack())


def grow(file: bytes, steps: list[tuple[int, Buffer]]) -> list[bytes]:
    """Return the file after each step, as a process would leave it that is killed there."""
    states, content = [], bytearray(file)
    for at, data in steps:
        if len(content) < at:
            content += bytes(at - len(content))
        content[at : at + len(data)] = data
        states.append(bytes(content))
    return states


def container_with(data: bytes, extra_leases: int, room: int) -> bytes:
    """Return a container with so many leases beyond the fourth, and so much room behind its data."""
    extra_offset = slot_file.DATA_OFFSET + len(data) + room
    header = slot_file.MutableHeader(2, b"n" * 20, b"w" * 32, len(data), extra_offset)
    records = [
        slot_file.make_lease(2, LeaseSecrets(b"%032d" % i, b"c" * 32), b"n" * 20, 1000).pack()
        for i in range(4 + extra_leases)
    ]
    stale = b"S" * room
    count = extra_leases.to_bytes(4, "big")
    return header.pack() + b"".join(records[:4]) + data + stale + count + b"".join(records[4:])


class PlanTests(SynchronousTestCase):
    """What a process that is killed leaves."""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        data=st.binary(max_size=300),
        extra_leases=st.integers(0, 4),
        room=st.integers(0, 100),
        junk=st.integers(0, 300),
        writes=st.lists(st.tuples(st.integers(0, 900), st.binary(max_size=200)), max_size=3),
        new_length=st.none() | st.integers(1, 1000),
    )
    def test_every_step_leaves_a_container(
        self,
        data: bytes,
        extra_leases: int,
        room: int,
        junk: int,
        writes: list[tuple[int, bytes]],
        new_length: int | None,
    ) -> None:
        """
        Wherever it is killed, all leases are there and the data has its old length or its new one; old bytes
        that no write touches are unchanged; the end is what the change demands.
        """
        whole = container_with(data, extra_leases, room)
        file = whole + b"J" * junk
        leases = all_leases(file)
        header = slot_file.parse_header(file)
        extra = whole[header.extra_offset :]
        steps = list(slot_file.plan_change(header, extra, len(file), writes, new_length))
        growth = slot_file.measure(header, writes, new_length)
        expected = bytearray(data)
        for offset, written in writes:
            expected += bytes(max(0, offset + len(written) - len(expected)))
            expected[offset : offset + len(written)] = written
        touched = {i for at, written in writes for i in range(at, at + len(written))}
        states = grow(file, steps)
        for state in states:
            self.assertEqual(all_leases(state), leases)
            now = share_data(state)
            self.assertIn(len(now), (len(data), growth.data_bytes))
            for i in range(min(len(now), len(data))):
                if i not in touched:
                    self.assertEqual(now[i], data[i])
        end = (states or [file])[-1][: growth.extra_offset + len(extra)]
        end += bytes(growth.extra_offset + len(extra) - len(end))
        self.assertEqual(share_data(end), bytes(expected[:new_length]))
        self.assertEqual(all_leases(end), leases)

    def test_only_new_room_is_zeroed(self) -> None:
        """A write far behind the end yields no zeros for what is behind the file's end anyway."""
        file = container_with(b"data", 0, 0)
        header = slot_file.parse_header(file)
        steps = list(slot_file.plan_change(header, bytes(4), len(file), [(1 << 40, b"x")], None))
        self.assertLess(sum(len(data) for _, data in steps), 100)


class DamageTests(SynchronousTestCase):
    """Containers that are none."""

    def test_what_is_no_mutable_container(self) -> None:
        """Short files, immutable containers, wrong magic and impossible numbers are refused."""
        good = container_with(b"data", 1, 0)
        self.assertTrue(slot_file.is_mutable(good))
        less_room = good[:84] + (5).to_bytes(8, "big") + good[92:]
        far = good[:92] + b"\xff" * 8 + good[100:]
        for wrong in (b"", good[:99], b"\0\0\0\2" * 30, b"T" * 200, less_room, far):
            self.assertRaises(ValueError, slot_file.parse_header, wrong)
        self.assertRaises(ValueError, slot_file.parse_count, b"\xff" * 4)
        self.assertEqual(slot_file.parse_count(b"\0"), 0)

    def test_version_1_is_read(self) -> None:
        """A container of version 1 is understood, and keeps its version."""
        old = slot_file.MAGICS[1] + container_with(b"data", 0, 0)[32:]
        header = slot_file.parse_header(old)
        self.assertEqual(header.version, 1)
        self.assertEqual(header.pack(), old[:100])
        secrets = LeaseSecrets(b"r" * 32, b"c" * 32)
        self.assertEqual(slot_file.make_lease(1, secrets, b"n" * 20, 0).renew, b"r" * 32)

    def test_secrets_do_not_show(self) -> None:
        """Neither write enabler nor lease secrets are in a repr."""
        header = slot_file.parse_header(container_with(b"", 0, 0))
        self.assertNotIn("www", repr(header))
        lease = slot_file.make_lease(1, LeaseSecrets(b"r" * 32, b"c" * 32), b"n" * 20, 0)
        self.assertNotIn("rrr", repr(lease))
        self.assertNotIn("ccc", repr(lease))
