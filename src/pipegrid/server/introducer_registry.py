"""
The announcements that an introducer passes on: which it accepts, which it keeps, and for how long.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import base64
import ipaddress
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from typing import Any

import attrs

from pipegrid.wire.announcements import MAX_MESSAGE_BYTES, Announcement, Signed, verify

# A client of an introducer knows its fURL and may announce any number of servers, each under a separate key;
# keys cost nothing. Addresses, connections and time do cost something, so these decide:
#
# * Space is limited: ``MAX_UNITS`` of ``UNIT_BYTES``. An announcement takes as many units as its message
#   fills, at least one.
# * A connection may announce ``MAX_PER_CONNECTION`` servers. A node announces itself, once per service.
# * The seniority of a server is the time in which a connection that announced it was open. After
#   ``ESTABLISHED_S`` the server is established, and never gives way to another one. Established servers take
#   at most seven eighths of the space, and those first announced from one address at most half of that, so
#   that there is always space for new servers.
# * When no space is left, a new server replaces one that is not established. This is a server of the address
#   whose such servers take most units; among those, a server that no connection announces, or else the one
#   with the least seniority. If the new server's own address would then take most, the new server is refused.
#   The only server of an address, or of a /48 of IPv6, gives way to none. So a flood from one address
#   replaces nothing: it fills the free space, and is then refused, while a new server at another address is
#   still accepted. Clients remember the announcements that they have received, but of a flood they get at
#   most what fits into the free space.
# * A server that no connection announces any more is removed after ``KEPT_S``, or ``KEPT_NEW_S`` if it is not
#   established. Only time in which the introducer runs is counted, by a clock that cannot be set: neither an
#   introducer that was down nor a wrong date removes a server.
#
# An announcement replaces that of the same key and service only if its sequence number is greater. If another
# client repeats a known announcement, this does no harm: the server stays listed.

UNIT_BYTES = 4096
"""The size of a unit of space; usual announcements have 1 to 3 KB."""

MAX_UNITS = 1024
"""Maximum units of all announcements: 4 MiB, which clients accept in one message and count as 16 MiB."""

MAX_ESTABLISHED_UNITS = MAX_UNITS // 8 * 7
MAX_PER_CONNECTION = 16
ESTABLISHED_S = 24 * 3600.0
KEPT_S = 30 * 24 * 3600.0
KEPT_NEW_S = 7 * 24 * 3600.0
MAX_SERVICE_CHARACTERS = 100
MAX_NICKNAME_CHARACTERS = 100
_MAX_PLACE_CHARACTERS = 100
_FORMAT = 1

ListingKey = tuple[str, str]
"""Service and server id; there is one announcement for each key."""


class AnnouncementVerdict(Enum):
    """The registry's decision about an announcement."""

    NEW = "new"
    CHANGED = "changed"
    KNOWN = "known"
    OLD = "old"


class RefusedAnnouncement(ValueError):
    """
    An announcement is not accepted; the text says why, without a subject.

    Attributes:
        reason: the reason in a word, for counters.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@attrs.define(eq=False)
class ListedServer:
    """
    One announcement that is passed on.

    Attributes:
        signed: message, signature and key, as received.
        place: the address from which the server was first announced. If the server is not established and no
            connection announces it, a changed announcement also changes the address.
        nickname: the server's name, for people.
        established: whether the server no longer gives way to others.
        holders: the open connections that announced the server, the oldest first.
        seniority_s: how long, until ``since_s``, there were holders; the sum of all such periods.
        absent_s: how long, until ``since_s``, there have been no holders.
        since_s: when ``holders`` last became empty, or not empty, or the times were last counted.
    """

    service: str
    server_id: str
    signed: Signed
    place: str
    nickname: str
    seqnum: int | None
    since_s: float
    established: bool = False
    seniority_s: float = 0.0
    absent_s: float = 0.0
    holders: dict[Hashable, None] = attrs.field(factory=dict)

    @property
    def index(self) -> ListingKey:
        """The key of the announcement in the registry: one signing key may announce several services."""
        return self.service, self.server_id

    @property
    def units(self) -> int:
        """How many units of space the announcement takes."""
        return units_of(self.signed)

    def count(self, now_s: float) -> None:
        """Add the time that has passed since ``since_s`` to the seniority or the absence."""
        passed_s = max(0.0, now_s - self.since_s)
        self.since_s = now_s
        if self.holders:
            self.seniority_s += passed_s
            self.absent_s = 0.0
        else:
            self.absent_s += passed_s


def units_of(signed: Signed) -> int:
    """Return how many units an announcement takes."""
    return max(1, -(-len(signed[0]) // UNIT_BYTES))


@attrs.define(eq=False)
class AnnouncementRegistry:
    """
    The listed servers of an introducer.

    Args:
        seconds: a clock that cannot be set.
        changed: called with each server whose announcement is new or changed, and whether the server is new.
        displaced: called with each open connection that announced a server which gave way to another one; it
            must not change the registry.
    """

    _seconds: Callable[[], float]
    _changed: Callable[[ListedServer, bool], None] = lambda server, is_new: None
    _displaced: Callable[[Hashable], None] = lambda connection: None
    _servers: dict[ListingKey, ListedServer] = attrs.field(factory=dict)
    _by_signed: dict[Signed, ListedServer] = attrs.field(factory=dict)
    _held: dict[Hashable, dict[ListingKey, None]] = attrs.field(factory=dict)
    # Units by address: of servers that are not established, and of established ones.
    _new_units: Counter[str] = attrs.field(factory=Counter)
    _established_units: Counter[str] = attrs.field(factory=Counter)
    _servers_of: Counter[str] = attrs.field(factory=Counter)  # by ``_site_of``
    units: int = 0
    replaced: int = 0
    """How many servers gave way to others."""

    def __len__(self) -> int:
        return len(self._servers)

    def __iter__(self) -> Iterator[ListedServer]:
        return iter(list(self._servers.values()))

    def __repr__(self) -> str:
        return f"<AnnouncementRegistry of {len(self)} in {self.units} units>"

    @property
    def established(self) -> int:
        """How many servers are established."""
        return sum(each.established for each in self._servers.values())

    def of_service(self, service: str) -> list[ListedServer]:
        """Return the listed servers of a service."""
        return [each for each in self._servers.values() if each.service == service]

    def knows(self, signed: object) -> bool:
        """
        Return whether this very announcement, byte for byte, is listed; its signature need not be verified
        for that.
        """
        return self._same(signed) is not None

    def publish(self, signed: object, connection: Hashable, place: str) -> AnnouncementVerdict:
        """
        Accept an announcement, or ignore it if it is known or old.

        Args:
            connection: the connection that sent the announcement; the caller calls ``lost`` when it has
                ended.
            place: the client's address.

        Raises:
            RefusedAnnouncement: the announcement is malformed, forged, or too large; or there is no space for
                it.
        """
        known = self._same(signed)
        if known is not None:
            self._hold(known, connection)
            return AnnouncementVerdict.KNOWN
        announcement, signed = _verified(signed)
        service = _service_of(announcement)
        known = self._servers.get((service, announcement.server_id))
        if known is None:
            return self._add(announcement, service, signed, connection, place)
        if json.loads(known.signed[0].decode("utf-8")) == announcement.fields:  # signed again
            self._hold(known, connection)
            return AnnouncementVerdict.KNOWN
        if not _is_newer(announcement.seqnum, known.seqnum):
            return AnnouncementVerdict.OLD
        self._replace(known, announcement, signed, connection, place)
        return AnnouncementVerdict.CHANGED

    def lost(self, connection: Hashable) -> None:
        """
        Record that a connection has ended; servers that no other connection announces are absent from now on.
        """
        now_s = self._seconds()
        for index in self._held.pop(connection, {}):
            server = self._servers[index]
            server.count(now_s)
            del server.holders[connection]

    def count_times(self) -> None:
        """Count the seniority and absence of all servers until now."""
        now_s = self._seconds()
        for server in self._servers.values():
            server.count(now_s)

    def tick(self) -> int:
        """
        Establish servers, and remove those that were absent too long; returns how many were removed. The
        caller calls this regularly.
        """
        self.count_times()
        removed = 0
        for server in self:
            if server.absent_s > (KEPT_S if server.established else KEPT_NEW_S):
                self._remove(server)
                removed += 1
        for server in sorted(self, key=lambda each: -each.seniority_s):
            if not server.established and server.seniority_s >= ESTABLISHED_S:
                self._establish(server)
        return removed

    # Storing.

    def as_json(self) -> bytes:
        """Return all listed servers, for ``restore`` in a later process."""
        now_s = self._seconds()
        parts = [b'{"format": %d, "announcements": [\n' % _FORMAT]
        for server in self:
            server.count(now_s)
            if len(parts) > 1:
                parts.append(b",\n")
            parts.append(_entry(server))
        parts.append(b"\n]}\n")
        return b"".join(parts)

    def restore(self, data: bytes) -> int:
        """
        List the announcements that ``as_json`` returned, after verifying each again; returns how many entries
        were skipped.

        Raises:
            ValueError: the data are damaged as a whole.
        """
        try:
            document = json.loads(data)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        entries = document.get("announcements") if isinstance(document, dict) else None
        if not isinstance(entries, list) or document.get("format") != _FORMAT:
            raise ValueError("it is not a list of announcements")
        skipped = sum(not self._restored(each) for each in entries[:MAX_UNITS])
        self.tick()
        return skipped + max(0, len(entries) - MAX_UNITS)

    def _restored(self, entry: Any) -> bool:
        try:
            message = base64.b64decode(entry["message"], validate=True)
            signed = (message, entry["signature"].encode("ascii"), entry["key"].encode("ascii"))
            place = str(entry["first_address"])[:_MAX_PLACE_CHARACTERS]
            times = _seconds_of(entry["connected_s"]), _seconds_of(entry["absent_s"])
            self.publish(signed, None, place)
            server = self._by_signed[signed]
        except (LookupError, TypeError, AttributeError, ValueError):
            return False
        server.seniority_s, server.absent_s = times
        return True

    # The parts of ``publish`` and ``tick``.

    def _same(self, signed: object) -> ListedServer | None:
        try:
            return self._by_signed.get(signed)  # type: ignore[call-overload, no-any-return]
        except TypeError:  # a malformed value that contains a list
            return None

    def _add(
        self,
        announcement: Announcement,
        service: str,
        signed: Signed,
        connection: Hashable,
        place: str,
    ) -> AnnouncementVerdict:
        if len(self._held.get(connection, ())) >= MAX_PER_CONNECTION:
            raise RefusedAnnouncement(
                "connection", f"one connection may announce {MAX_PER_CONNECTION} servers, no more"
            )
        self._make_space(units_of(signed), place)
        server = ListedServer(
            service=service,
            server_id=announcement.server_id,
            signed=signed,
            place=place,
            nickname=_nickname_of(announcement),
            seqnum=announcement.seqnum,
            since_s=self._seconds(),
        )
        self._servers[server.index] = server
        self._by_signed[signed] = server
        self._count_units(server, 1)
        self._hold(server, connection)
        self._changed(server, True)
        return AnnouncementVerdict.NEW

    def _replace(
        self,
        server: ListedServer,
        announcement: Announcement,
        signed: Signed,
        connection: Hashable,
        place: str,
    ) -> None:
        units = units_of(signed)
        self._count_units(server, -1)
        try:
            # The new announcement uses the space of the old one; a larger one needs more space, as for a new
            # server.
            if units > server.units:
                if server.established and not self._may_establish(units, server.place):
                    raise RefusedAnnouncement(
                        "full", "the introducer has no space for a longer announcement"
                    )
                self._make_space(units, server.place, but=server)
        except RefusedAnnouncement:
            self._count_units(server, 1)
            raise
        del self._by_signed[server.signed]
        server.signed, server.seqnum = signed, announcement.seqnum
        server.nickname = _nickname_of(announcement)
        if not server.established and not server.holders:
            server.place = place
        self._by_signed[signed] = server
        self._count_units(server, 1)
        self._hold(server, connection)
        self._changed(server, False)

    def _hold(self, server: ListedServer, connection: Hashable) -> None:
        """
        Record that a connection announces a server. For a restored announcement ``connection`` is None, and
        nothing is recorded.
        """
        held = self._held.get(connection, {})
        if connection is None or connection in server.holders or len(held) >= MAX_PER_CONNECTION:
            return
        server.count(self._seconds())
        server.absent_s = 0.0
        server.holders[connection] = None
        self._held.setdefault(connection, {})[server.index] = None

    def _make_space(self, units: int, place: str, but: ListedServer | None = None) -> None:
        """
        Remove servers that give way, so that ``units`` are free.

        Args:
            place: the address of the server that needs the space.
            but: the server itself, which must stay, if it is listed and needs more space; None for a new
                server.

        Raises:
            RefusedAnnouncement: too few servers give way; none was removed.
        """
        missing = self.units + units - MAX_UNITS
        if missing <= 0:
            return
        loads = self._new_units.copy()
        loads[place] += units
        victims: list[ListedServer] = []
        left = self._servers_of.copy()
        candidates: dict[str, list[ListedServer]] = {}
        while missing > 0:
            most = max(loads, key=lambda each: loads[each])
            if most == place or loads[most] <= loads[place]:
                raise RefusedAnnouncement(
                    "full", "the introducer has no space for more servers from this address"
                )
            if most not in candidates:
                candidates[most] = self._new_servers(most, but)
            site = _site_of(most)
            if not candidates[most] or left[site] <= 1:
                del loads[most]
                continue
            victim = candidates[most].pop()
            victims.append(victim)
            left[site] -= 1
            loads[most] -= victim.units
            missing -= victim.units
        connections = {each: None for victim in victims for each in victim.holders}
        for victim in victims:
            self._remove(victim)
        self.replaced += len(victims)
        for connection in connections:
            self._displaced(connection)

    def _new_servers(self, place: str, but: ListedServer | None) -> list[ListedServer]:
        """
        Return the servers of an address that are not established, except ``but``; the last one gives way
        first.
        """
        now_s = self._seconds()
        found = [
            each
            for each in self._servers.values()
            if each.place == place and not each.established and each is not but
        ]
        for each in found:
            each.count(now_s)
        return sorted(found, key=lambda each: (not each.holders, -each.seniority_s))

    def _remove(self, server: ListedServer) -> None:
        self._count_units(server, -1)
        del self._servers[server.index]
        del self._by_signed[server.signed]
        for connection in server.holders:
            del self._held[connection][server.index]

    def _establish(self, server: ListedServer) -> None:
        if self._may_establish(server.units, server.place):
            self._count_units(server, -1)
            server.established = True
            self._count_units(server, 1)

    def _may_establish(self, units: int, place: str) -> bool:
        """Return whether established servers of an address may take this number of further units."""
        left = MAX_ESTABLISHED_UNITS - self._established_units.total()
        left_of_place = MAX_ESTABLISHED_UNITS // 2 - self._established_units[place]
        return units <= min(left, left_of_place)

    def _count_units(self, server: ListedServer, sign: int) -> None:
        units = sign * server.units
        self.units += units
        _add(self._servers_of, _site_of(server.place), sign)
        counts = self._established_units if server.established else self._new_units
        _add(counts, server.place, units)


def _add(counts: Counter[str], place: str, more: int) -> None:
    counts[place] += more
    if not counts[place]:
        del counts[place]


def _site_of(place: str) -> str:
    """
    Return the site of an address: an IPv4 address, or a /48 of IPv6, the smallest network of one member.
    """
    try:
        address = ipaddress.ip_address(place.partition("%")[0])
    except ValueError:
        return place
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 48), strict=False))


def _entry(server: ListedServer) -> bytes:
    message, signature, key = server.signed
    entry = {
        "message": base64.b64encode(message).decode("ascii"),
        "signature": signature.decode("ascii"),
        "key": key.decode("ascii"),
        "first_address": server.place,
        "connected_s": round(server.seniority_s),
        "absent_s": round(server.absent_s),
    }
    return json.dumps(entry).encode("ascii")


def _is_newer(seqnum: int | None, known: int | None) -> bool:
    return known is None or (seqnum is not None and seqnum > known)


def _verified(signed: Any) -> tuple[Announcement, Signed]:
    try:
        return verify(signed), signed
    except ValueError as error:
        large = isinstance(signed, tuple) and any(
            isinstance(each, bytes) and len(each) > MAX_MESSAGE_BYTES for each in signed
        )
        raise RefusedAnnouncement("large" if large else "invalid", str(error)) from None


def _service_of(announcement: Announcement) -> str:
    service = announcement.fields.get("service-name")
    if not (isinstance(service, str) and 1 <= len(service) <= MAX_SERVICE_CHARACTERS):
        raise RefusedAnnouncement(
            "invalid",
            f"its service-name is not a text of 1 to {MAX_SERVICE_CHARACTERS} characters",
        )
    return service


def _nickname_of(announcement: Announcement) -> str:
    nickname = announcement.fields.get("nickname")
    return nickname[:MAX_NICKNAME_CHARACTERS] if isinstance(nickname, str) else ""


def _seconds_of(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise ValueError("it is not a number of seconds")
    return float(value)
