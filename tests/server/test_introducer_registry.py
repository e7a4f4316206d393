"""What an introducer lists: what it accepts, what gives way, what ages, and what a later process knows."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.server import introducer_registry
from pipegrid.server.introducer_registry import (
    ESTABLISHED_S,
    KEPT_NEW_S,
    KEPT_S,
    MAX_ESTABLISHED_UNITS,
    MAX_PER_CONNECTION,
    MAX_UNITS,
    UNIT_BYTES,
    AnnouncementRegistry,
    AnnouncementVerdict,
    ListedServer,
    RefusedAnnouncement,
)
from pipegrid.wire.announcements import (
    MAX_MESSAGE_BYTES,
    Announcement,
    AnnouncementKey,
    Signed,
    sign,
)

HONEST, ENEMY = "192.0.2.1", "198.51.100.1"


def announced(
    number: int, seqnum: int | None = 1, size: int = 0, service: Any = "storage", **fields: Any
) -> Signed:
    """Return the announcement of a server, with about so many bytes."""
    content = {"service-name": service, "nickname": f"n{number}", "pad": "x" * size, **fields}
    if seqnum is not None:
        content["seqnum"] = seqnum
    return sign(content, AnnouncementKey(number.to_bytes(32, "big")))


class RegistryTestCase(SynchronousTestCase):
    """A registry whose clock the test moves."""

    def setUp(self) -> None:
        self.now_s = 1000.0
        self.heard: list[str] = []
        self.registry = AnnouncementRegistry(lambda: self.now_s, self.note)

    def note(self, server: ListedServer, _is_new: bool) -> None:
        """Note what subscribers would receive."""
        self.heard.append(server.nickname)

    def publish(
        self, signed: object, connection: object = None, place: str = HONEST
    ) -> AnnouncementVerdict:
        """Announce something, on a connection of its own."""
        return self.registry.publish(signed, connection or object(), place)

    def refusal(self, signed: object, connection: object = None, place: str = HONEST) -> str:
        """Return why an announcement is refused."""
        with self.assertRaises(RefusedAnnouncement) as caught:
            self.publish(signed, connection, place)
        reason: str = caught.exception.reason
        return reason

    def listed(self) -> set[str]:
        """Return the names of the listed servers."""
        return {each.nickname for each in self.registry}


class AcceptanceTests(RegistryTestCase):
    """One announcement."""

    def test_new_and_changed(self) -> None:
        """Subscribers get the new and the changed, once; a lower number, or the same, is ignored."""
        old = announced(1, 1)
        self.assertIs(self.publish(old), AnnouncementVerdict.NEW)
        self.assertIs(self.publish(old), AnnouncementVerdict.KNOWN)
        self.assertIs(self.publish(announced(1, 3)), AnnouncementVerdict.CHANGED)
        for replayed in (old, announced(1, 3, extra="other"), announced(1, None)):
            self.assertIs(self.publish(replayed), AnnouncementVerdict.OLD)
        self.assertEqual(self.heard, ["n1", "n1"])
        self.assertEqual([each.seqnum for each in self.registry], [3])

    def test_without_a_number(self) -> None:
        """Any announcement replaces one that has no number, as with Tahoe-LAFS."""
        self.publish(announced(1, None))
        self.assertIs(self.publish(announced(1, None, extra="other")), AnnouncementVerdict.CHANGED)
        self.assertIs(self.publish(announced(1, 1)), AnnouncementVerdict.CHANGED)

    def test_services_are_apart(self) -> None:
        """One key may announce several services; each has its own numbers."""
        self.publish(announced(1, 5))
        other = announced(1, 1, service="other")
        self.assertIs(self.publish(other), AnnouncementVerdict.NEW)
        self.assertEqual([each.signed for each in self.registry.of_service("other")], [other])

    def test_forged_and_malformed(self) -> None:
        """Nothing unsigned is listed, and nothing that is no announcement."""
        message, signature, key = announced(1)
        others_key = announced(2)[2]
        malformed: tuple[Any, ...] = (
            (message, signature, others_key),
            (message.replace(b"n1", b"n2"), signature, key),
            (message, announced(2)[1], key),
            (message, b"", b""),
            (message, signature, b"v1-" + key[3:]),
            (message, signature),
            [message, signature, key],
            ("text", signature, key),
            (message, [signature], key),
            None,
            {},
            sign([], AnnouncementKey(b"k" * 32)),  # type: ignore[arg-type]
            announced(1, service=None),
            announced(1, service=""),
            announced(1, service="x" * 101),
            announced(1, service=["storage"]),
        )
        for wrong in malformed:
            self.assertEqual(self.refusal(wrong), "invalid", repr(wrong)[:60])
        self.assertEqual((len(self.registry), self.heard), (0, []))

    def test_large(self) -> None:
        """An announcement larger than clients accept is refused before its signature is verified."""
        self.patch(introducer_registry, "_service_of", None)
        self.assertEqual(self.refusal((b"x" * (MAX_MESSAGE_BYTES + 1), b"", b"")), "large")

    def test_one_connection(self) -> None:
        """It may announce a few servers, and repeat those of others as often as it likes."""
        for number in range(40):
            self.publish(announced(number))
        one = object()
        for number in range(100, 100 + MAX_PER_CONNECTION):
            self.publish(announced(number), one)
        self.assertEqual(self.refusal(announced(99), one), "connection")
        self.assertIs(self.publish(announced(7), one), AnnouncementVerdict.KNOWN)


class SpaceTests(RegistryTestCase):
    """A full registry: verified announcements are not the point, so nothing is signed here."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(introducer_registry, "verify", self.verified)

    @staticmethod
    def verified(signed: Any) -> Announcement:
        """Return an announcement whose signature is not looked at."""
        return Announcement(signed[2].decode("ascii"), json.loads(signed[0]))

    @staticmethod
    def unsigned(number: int, units: int = 1, seqnum: int = 1) -> Signed:
        """Return an announcement that takes so many units."""
        fields = {"service-name": "storage", "nickname": f"n{number}", "seqnum": seqnum}
        message = json.dumps(fields).encode("ascii")
        return message.ljust((units - 1) * UNIT_BYTES + 1), b"", b"v0-%d" % number

    def flood(self, count: int, place: str = ENEMY, first: int = 10_000, units: int = 1) -> int:
        """Announce many servers, from one address; returns how many were refused."""
        refused = 0
        for number in range(first, first + count):
            try:
                self.publish(self.unsigned(number, units), place=place)
            except RefusedAnnouncement:  # noqa: PERF203  most of them
                refused += 1
        return refused

    def test_a_flood_from_one_address(self) -> None:
        """It fills what is free, and replaces nothing: clients hear of no more than that."""
        for number in range(10):
            self.publish(self.unsigned(number), place=f"192.0.2.{number}")
        self.assertEqual(self.flood(100_000), 100_000 - (MAX_UNITS - 10))
        self.assertLessEqual({f"n{number}" for number in range(10)}, self.listed())
        self.assertEqual((len(self.registry), self.registry.units), (MAX_UNITS, MAX_UNITS))
        self.assertEqual((len(self.heard), self.registry.replaced), (MAX_UNITS, 0))

    def test_new_servers_during_a_flood(self) -> None:
        """A server at another address is listed although there is no space; the flood's last gives way."""
        self.flood(MAX_UNITS)
        self.assertIs(self.publish(self.unsigned(1), place=HONEST), AnnouncementVerdict.NEW)
        self.assertNotIn(f"n{10_000 + MAX_UNITS - 1}", self.listed())
        self.assertEqual((len(self.registry), self.registry.replaced), (MAX_UNITS, 1))
        self.assertEqual(self.flood(1000, first=50_000), 1000)
        self.assertIn("n1", self.listed())

    def test_large_announcements(self) -> None:
        """They take as much as several; a new server replaces as many as it needs, or none."""
        self.flood(MAX_UNITS // 8, units=8)
        self.assertEqual(len(self.registry), MAX_UNITS // 8)
        self.assertEqual(self.refusal(self.unsigned(1, 8), place=ENEMY), "full")
        self.publish(self.unsigned(2, 3), place=HONEST)
        self.assertEqual(self.registry.units, MAX_UNITS - 8 + 3)
        self.publish(self.unsigned(3, 8), place="192.0.2.2")
        self.assertEqual(self.registry.units, MAX_UNITS - 16 + 3 + 8)

    def test_many_addresses_in_the_first_day(self) -> None:
        """The addresses share what is not established evenly; a few servers behind one stay listed."""
        for number in range(5):
            self.publish(self.unsigned(number), place=HONEST)
        for place in range(100):
            self.flood(100, place=f"198.51.100.{place}", first=10_000 + 100 * place)
        self.assertLessEqual({f"n{number}" for number in range(5)}, self.listed())
        self.assertEqual(self.registry.units, MAX_UNITS)

    def test_a_lone_server_stays(self) -> None:
        """However much it takes: only an address with several has one that gives way; of IPv6, a /48."""
        self.publish(self.unsigned(1, 8), place=HONEST)
        self.publish(self.unsigned(2, 3), place="2001:db8:1::1")
        self.publish(self.unsigned(3, 3), place="2001:db8:2::1")
        self.publish(self.unsigned(4, 3), place="2001:db8:2:3::1")
        for place in range(MAX_UNITS):
            self.flood(1, place=f"place {place}", first=10_000 + place)
        self.assertEqual(
            self.listed() & {"n1", "n2", "n3", "n4"} | {"n3", "n4"}, {"n1", "n2", "n3", "n4"}
        )
        self.assertEqual(len(self.listed() & {"n3", "n4"}), 1)
        self.assertEqual(self.refusal(self.unsigned(5), place="192.0.2.5"), "full")

    def test_who_is_told(self) -> None:
        """The connections of a server that gave way, and no others."""
        told: list[object] = []
        self.registry = AnnouncementRegistry(lambda: self.now_s, displaced=told.append)
        for number in range(MAX_UNITS):
            self.publish(self.unsigned(number), f"connection {number}", ENEMY)
        self.publish(self.unsigned(MAX_UNITS - 1), "another", ENEMY)
        self.publish(self.unsigned(10_000), "new", HONEST)
        self.assertEqual(told, [f"connection {MAX_UNITS - 1}", "another"])

    def test_established_servers_stay(self) -> None:
        """After a day nothing displaces a server: not a flood from as many addresses as there are servers."""
        for number in range(30):
            self.publish(self.unsigned(number), place=HONEST)
        self.now_s += ESTABLISHED_S
        self.registry.tick()
        self.assertEqual(self.registry.established, 30)
        for place in range(3000):
            self.flood(1, place=f"place {place}", first=10_000 + place)
        self.assertLessEqual({f"n{number}" for number in range(30)}, self.listed())
        self.assertEqual(self.registry.units, MAX_UNITS)

    def test_only_connected_time_counts(self) -> None:
        """What was announced on a connection that has ended does not become established."""
        one = object()
        self.publish(self.unsigned(1), one)
        self.now_s += ESTABLISHED_S - 1
        self.registry.lost(one)
        self.now_s += 100.0
        self.registry.tick()
        self.assertEqual(self.registry.established, 0)
        self.publish(self.unsigned(1))
        self.now_s += 1.0
        self.registry.tick()
        self.assertEqual(self.registry.established, 1)

    def test_space_for_new_servers(self) -> None:
        """Enemies that wait for a day leave some for others; to take that, they need as many addresses."""
        for place in range(64):
            self.flood(16, place=f"place {place}", first=10_000 + 16 * place)
        self.now_s += ESTABLISHED_S
        self.registry.tick()
        self.assertEqual(self.registry.established, MAX_ESTABLISHED_UNITS)
        for number in range(64):
            self.assertIs(
                self.publish(self.unsigned(number), place=f"{number}"), AnnouncementVerdict.NEW
            )

    def test_half_for_one_address(self) -> None:
        """Of the space of established servers, those of one address take half."""
        self.flood(MAX_UNITS)
        self.now_s += ESTABLISHED_S
        self.registry.tick()
        self.assertEqual(self.registry.established, MAX_ESTABLISHED_UNITS // 2)

    def test_growing_announcements(self) -> None:
        """An established server that needs more than there is keeps what it has; one that shrinks may."""
        for place in range(MAX_UNITS):
            self.flood(1, place=f"place {place}", first=10_000 + place)
        self.now_s += ESTABLISHED_S
        self.registry.tick()
        self.assertEqual(self.refusal(self.unsigned(10_000, 8, seqnum=2)), "full")
        self.assertIs(self.publish(self.unsigned(10_000, 1, seqnum=2)), AnnouncementVerdict.CHANGED)
        self.assertEqual((len(self.registry), self.registry.units), (MAX_UNITS, MAX_UNITS))
        self.assertEqual(sum(each.units for each in self.registry), MAX_UNITS)

    def test_absent_servers(self) -> None:
        """New ones are removed after a week, established ones after a month; then the list is empty."""
        one, other = object(), object()
        self.publish(self.unsigned(1), one)
        self.now_s += ESTABLISHED_S
        self.registry.tick()
        self.publish(self.unsigned(2), other)
        self.registry.lost(one)
        self.registry.lost(other)
        self.registry.lost(other)
        for passed_s, listed in (
            (KEPT_NEW_S, {"n1", "n2"}),
            (1.0, {"n1"}),
            (KEPT_S - KEPT_NEW_S - 1, {"n1"}),
            (1.0, set()),
        ):
            self.now_s += passed_s
            self.registry.tick()
            self.assertEqual(self.listed(), listed)
        self.assertEqual(self.registry.units, 0)
        self.assertEqual(self.registry._by_signed, {})

    def test_repeated_by_others(self) -> None:
        """A server counts as connected as long as any connection that repeated its announcement is open."""
        own, other = object(), object()
        self.publish(self.unsigned(1), own)
        self.publish(self.unsigned(1), other, ENEMY)
        self.registry.lost(other)
        self.now_s += 2 * KEPT_S
        self.registry.tick()
        self.assertEqual([each.place for each in self.registry], [HONEST])

    def test_a_clock_that_goes_back(self) -> None:
        """Takes nothing from seniority."""
        self.publish(self.unsigned(1))
        self.now_s += ESTABLISHED_S
        self.registry.tick()
        self.now_s = 0.0
        self.registry.tick()
        self.assertEqual(self.registry.established, 1)


class StoringTests(RegistryTestCase):
    """What the next process lists."""

    def restored(self, data: bytes) -> tuple[AnnouncementRegistry, int]:
        """Return a registry of what was stored, and how much of it was skipped."""
        registry = AnnouncementRegistry(lambda: 5.0)
        return registry, registry.restore(data)

    def test_the_next_process(self) -> None:
        """It lists the same, with the same seniority and absence; time while none runs does not count."""
        gone = object()
        for number in range(3):
            self.publish(announced(number))
        self.publish(announced(8), gone)
        self.now_s += ESTABLISHED_S
        self.registry.lost(gone)
        self.registry.tick()
        self.now_s += 10.0
        data = self.registry.as_json()
        registry, skipped = self.restored(data)
        self.assertEqual((len(registry), registry.established, skipped), (4, 4, 0))
        self.assertEqual(
            {each.nickname: each.absent_s for each in registry},
            {"n0": 0, "n1": 0, "n2": 0, "n8": 10},
        )
        self.assertEqual(json.loads(registry.as_json()), json.loads(data))

    def test_everything_is_verified_again(self) -> None:
        """A changed entry, one without a part, and one too many are skipped, and counted."""
        for number in range(8):
            self.publish(announced(number))
        document = json.loads(self.registry.as_json())
        entries = document["announcements"]
        entries[0]["signature"] = entries[1]["signature"]
        del entries[1]["key"]
        entries[2]["message"] = "%"
        entries[3]["connected_s"] = -1
        entries[4]["absent_s"] = True
        entries[5]["absent_s"] = 1e400
        entries[6] = 7
        registry, skipped = self.restored(json.dumps(document).encode("ascii"))
        self.assertEqual(({each.nickname for each in registry}, skipped), ({"n7"}, 7))

    def test_damaged(self) -> None:
        """A file that is no list is an error, whatever it is."""
        for data in (b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"announcements": []}'):
            self.assertRaises(ValueError, self.restored, data)
