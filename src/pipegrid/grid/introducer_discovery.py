"""
Finds servers through introducers while the grid runs, and caches each introducer's announcements.

With the cache, the grid is usable at once, and while introducers are down. A restarted introducer knows no
servers until they announce themselves again, some only after an hour; so a server that is no longer announced
stays in the cache for a day. An operation starts as soon as enough servers are known. If the cache has too
few, the operation waits, at most 15 s, until each introducer has responded or failed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from pipegrid.core.text import counted
from pipegrid.disk.atomic_write import replace_file
from pipegrid.errors import UsageError
from pipegrid.grid.introducer_client import IntroducerCallbacks, IntroducerClient, IntroducerStatus
from pipegrid.grid.servers_and_introducers_yaml import IntroducerAddress, read_bounded
from pipegrid.grid.strict_config import parse_yaml
from pipegrid.reactor.deferreds import Timer, Waiters, timeout_or
from pipegrid.wire.announcements import (
    MAX_ID_CHARACTERS,
    MAX_SERVERS,
    Announcement,
    AnnouncementRecords,
    KnownServer,
    describe,
)
from pipegrid.wire.grid_manager_certificates import ManagerKey
from pipegrid.wire.introducer_protocol import Connect

# The announcements of each introducer are cached in one file, so that the grid is usable while the introducer
# is down.
#
# The file is a list of ``ann`` and ``key_s``, in Tahoe-LAFS's format; in a Tahoe-LAFS directory, the node's
# own cache is read as well. A server that the introducer no longer announces also has ``missing_since``. The
# file is written as JSON, which is also YAML but is parsed a hundred times faster, with one line for each
# server. If the file cannot be used, the client warns and continues without a cache.


def cache_name(introducer: str) -> str:
    """Return the name of an introducer's cache file; different introducers have different file names."""
    return cache_names(introducer)[0]


def cache_names(introducer: str) -> list[str]:
    """
    Return the possible names of an introducer's cache file: the current name first, then those of earlier
    versions.
    """
    plain = "".join(c if (c.isalnum() and c.isascii()) or c in "-_." else "_" for c in introducer)
    names = [plain[:100]]
    if names[0] != introducer:
        # Without a hash, replaced characters would make names equal (of a Cyrillic name only the length would
        # remain).
        digest = hashlib.sha256(introducer.encode("utf-8", "replace")).hexdigest()
        names.insert(0, f"{names[0]}-{digest[:16]}")
    return [f"introducer_{each}_cache.yaml" for each in names]


def read_cache(path: Path) -> list[Announcement]:
    """
    Return the announcements in a cache file; an empty list if the file does not exist.

    Raises:
        UsageError: the file cannot be read or parsed.
    """
    data = read_bounded(path)
    if data is None:
        return []
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = parse_yaml(data, str(path))
    if not isinstance(document, list):
        raise UsageError(f"cannot understand {path}: it is not a list; remove it")
    return [each for each in map(_announcement, document[:MAX_SERVERS]) if each is not None]


def _announcement(entry: Any) -> Announcement | None:
    if not isinstance(entry, dict):
        return None
    server_id, fields = entry.get("key_s"), entry.get("ann")
    if isinstance(server_id, bytes):  # some versions of Tahoe-LAFS wrote this
        server_id = server_id.decode("ascii", "replace")
    if not isinstance(server_id, str) or len(server_id) > MAX_ID_CHARACTERS:
        return None
    since = entry.get("missing_since")
    since_s = float(since) if isinstance(since, (int, float)) and 0 <= since < 1e12 else None
    return Announcement(server_id, fields, since_s) if isinstance(fields, dict) else None


def write_cache(path: Path, announcements: Iterable[Announcement]) -> None:
    """
    Replace a cache file atomically. Other users cannot read it, since server addresses are secrets.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [
        json.dumps(
            {"ann": dict(each.fields), "key_s": each.server_id}
            | ({} if each.missing_since_s is None else {"missing_since": int(each.missing_since_s)})
        )
        for each in announcements
    ]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document = "[" + ",\n".join(lines) + "]\n"
    replace_file(path, document.encode("ascii"), durable=False)


PATIENCE_S = 15.0
"""The longest wait of an operation for introducers if too few servers are cached."""
GRACE_S = 2.0
"""How long to wait for announcements after all introducers responded or failed, unless all failed."""
FORGET_AFTER_S = 24 * 3600.0
"""How long a server stays cached although its introducer responds and no longer announces it."""
_WRITE_AFTER_S = 1.0
_WRITE_AGAIN_AFTER_S = 30.0
"""Shortest time between writes of the caches: each write replaces whole files, and news may never end."""

log = Logger()


@attrs.frozen
class DiscoverySettings:
    """
    The introducers of a client, and how their announcements are stored.

    Attributes:
        addresses: the introducers.
        caches: directories with cached announcements; only the first is written. May be empty.
        nickname: the name that the client gives to introducers.
        managers: the grid managers; of the certificates in announcements, only theirs are stored.
    """

    addresses: Sequence[IntroducerAddress]
    caches: Sequence[Path]
    nickname: str = ""
    managers: Sequence[ManagerKey] = ()


class Discovery:
    """
    Receives the announcements of all introducers of a grid.

    Args:
        connect: makes connections: a tub's ``getReference``.
        found: called with every server, and again when its announcement changes.
        warn: called with a sentence for each skipped announcement, unreachable introducer, and cache that
            cannot be used.
    """

    def __init__(
        self,
        settings: DiscoverySettings,
        connect: Connect,
        clock: IReactorTime,
        *,
        found: Callable[[KnownServer], None],
        warn: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._now = time.time
        self._caches = settings.caches
        self._found = found
        self._warn = warn
        self._records = AnnouncementRecords(managers=settings.managers)
        self._waiting: Waiters[None] = Waiters()
        # Wake waiting callers in the next reactor turn: they may stop the introducer client that is calling
        # this object.
        self._waking = Timer(clock, self._wake)
        self._writing = Timer(clock, self._write)
        self._write_after_s = _WRITE_AFTER_S
        self._remembered: dict[str, dict[str, float | None]] = {}
        """By introducer: the ids of cached servers, each with the time since when it was not announced."""
        callbacks = IntroducerCallbacks(self._on_announcement, warn, self._verdict)
        self.clients = [
            IntroducerClient(
                address,
                connect,
                clock,
                self._records,
                callbacks,
                nickname=settings.nickname,
                most_servers=self._records.limit // len(settings.addresses),
            )
            for address in settings.addresses
        ]

    @property
    def settled(self) -> bool:
        """Whether every introducer has responded or failed."""
        return all(client.answered or client.failed for client in self.clients)

    @property
    def statuses(self) -> list[IntroducerStatus]:
        """The state of each introducer, in the order of the settings."""
        return [client.status for client in self.clients]

    def start(self) -> None:
        """Read the caches and subscribe to the introducers."""
        for client in self.clients:
            self._remember(client)
        for client in self.clients:
            client.start()

    def stop(self) -> None:
        """Unsubscribe, and write the caches if announcements were received since the last write."""
        if self._writing.is_set:
            self._writing.stop()
            self._write()
        for client in self.clients:
            client.stop()
        self._waking.stop()
        self._wake()

    async def wait(self, enough: Callable[[], bool] = lambda: False) -> None:
        """
        Return when there are enough servers, when introducers are unlikely to announce more, or after
        ``PATIENCE_S``.
        """
        deadline = self._clock.seconds() + PATIENCE_S
        settled = False
        while not enough():
            if self.settled and not settled:
                settled = True
                grace_s = GRACE_S if any(client.answered for client in self.clients) else 0.0
                deadline = min(deadline, self._clock.seconds() + grace_s)
            left_s = deadline - self._clock.seconds()
            if left_s <= 0:
                return
            await timeout_or(self._waiting.wait(), left_s, self._clock)

    async def wait_settled(self) -> None:
        """Return when every introducer has responded or failed, or after ``PATIENCE_S``."""
        deadline = self._clock.seconds() + PATIENCE_S
        while not self.settled and (left_s := deadline - self._clock.seconds()) > 0:
            await timeout_or(self._waiting.wait(), left_s, self._clock)

    def _wake(self) -> None:
        self._waiting.fire(None)

    def _verdict(self) -> None:
        for client in self.clients:
            if client.failed and not client.answered:
                status = client.status
                count = len(self._remembered.get(status.name, ()))
                named = "that it named earlier"
                known = counted(count, f"server {named} is", f"servers {named} are")
                servers = f"the {known}" if count else "none is"
                self._warn(
                    f"introducer {status.name} at {status.address} is unreachable: {status.reason}; "
                    f"{servers} remembered, and it is tried again"
                )
        self._waking.set(0)

    def _on_announcement(self, announcement: Announcement) -> None:
        self._describe(announcement)
        self._writing.set(self._write_after_s)

    def _describe(self, announcement: Announcement) -> None:
        try:
            self._found(describe(announcement.server_id, announcement.fields))
        except ValueError as error:
            shown = announcement.server_id[:60]
            self._warn(f"the announcement of server {shown!r} is skipped: {error}")

    def _remember(self, client: IntroducerClient) -> None:
        name = client.address.name
        for path in [each / file for each in self._caches for file in cache_names(name)]:
            try:
                remembered = read_cache(path)
            except UsageError as error:
                self._warn(f"earlier announcements of introducer {name} cannot be used: {error}")
                continue
            for announcement in remembered:
                if client.remember(announcement):
                    self._describe(announcement)
            if remembered:
                self._remembered[name] = {
                    each.server_id: each.missing_since_s for each in remembered
                }
                return

    def _write(self) -> None:
        self._write_after_s = _WRITE_AGAIN_AFTER_S
        for client in self.clients if self._caches else ():
            if not client.answered:
                continue
            heard = self._worth_keeping(client)
            path = self._caches[0] / cache_name(client.address.name)
            try:
                write_cache(path, heard)
            except OSError as error:
                self._warn(
                    f"cannot write {path}: {error.strerror}; announcements are not remembered"
                )

    def _worth_keeping(self, client: IntroducerClient) -> list[Announcement]:
        """
        Return the announcements of an introducer to cache: of the servers that it announces, and of those
        that it stopped announcing less than ``FORGET_AFTER_S`` ago.
        """
        now_s = self._now()
        known = self._records.announcements
        earlier = self._remembered.get(client.address.name, {})
        if client.is_full or len(known) >= self._records.limit:
            earlier = {}  # missing servers would displace announced ones
        found = []
        for each in known:
            if each.server_id in client.announced:
                found.append(each)
            elif each.server_id in earlier:
                since_s = min(earlier[each.server_id] or now_s, now_s)
                if now_s - since_s <= FORGET_AFTER_S:
                    found.append(attrs.evolve(each, missing_since_s=since_s))
        return found
