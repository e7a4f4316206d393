"""
The onion service of a storage server: Tor forwards its connections to the server's port on this machine.

Tor keeps the service as long as the connection to Tor's control port lasts, so the service is added again
after Tor was restarted. The service's key, and thus its name, stays in ``private/tor_onion.privkey``, in the
format of Tahoe-LAFS.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from pipegrid.disk.atomic_write import create_file
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.reactor.connection_policy import Find, ProxyAddress
from pipegrid.reactor.deferreds import as_deferred
from pipegrid.reactor.tor_control_port import (
    CONTROL_ADDRESSES,
    CONTROL_S,
    connect_first,
    reason_of,
)
from pipegrid.wire.introducer_protocol import Reconnecting

KEY_NAME = "private/tor_onion.privkey"
EXTERNAL_PORT = 3457
"""The port of the onion service for clients, as in Tahoe-LAFS."""

_KEY = re.compile(r"ED25519-V3:[A-Za-z0-9+/]{86}==\Z")
_SERVICE = re.compile(r"[a-z2-7]{56}\Z")
_MAX_KEY_BYTES = 4096

log = Logger()


@attrs.frozen
class OnionSettings:
    """
    The settings of an onion service.

    Attributes:
        key: the file with the service's key; created if it does not exist.
        control: the possible addresses of Tor's control port, tried in this order.
        external_port: the service's port for clients.
        find_control: a function that starts Tor and returns the addresses of its control port, used instead
            of ``control``; None: ``control`` is used.
    """

    key: Path
    control: tuple[ProxyAddress, ...] = CONTROL_ADDRESSES
    external_port: int = EXTERNAL_PORT
    find_control: Find | None = None


class OnionService:
    """
    The onion service for a port of this machine.

    Args:
        local_port: the port of 127.0.0.1 to which Tor forwards the service's connections.

    Attributes:
        hint: the service's address for clients, as a hint of Foolscap; empty until the service is started.
    """

    def __init__(self, reactor: Any, settings: OnionSettings, local_port: int) -> None:
        self.hint = ""
        self._reactor = reactor
        self._settings = settings
        self._local_port = local_port
        self._protocol: Any = None
        self._stopped = False
        self._keeping = Reconnecting(
            reactor, self._use, self._lost, lambda: random.uniform(0.7, 1.3)
        )

    async def start(self) -> None:
        """
        Add the service to Tor, and keep it there until it is stopped.

        Raises:
            UsageError: Tor is not reached, or does not add the service; or the service's key cannot be read
                or written.
        """
        try:
            self._protocol = await self._add()
        except ConnectionError as error:
            raise UsageError(str(error)) from None
        self._keeping.start()

    async def stop(self) -> None:
        """Remove the service by closing the connection to Tor."""
        self._stopped = True
        protocol, self._protocol = self._protocol, None
        self._keeping.stop()
        if protocol is not None:
            protocol.transport.abortConnection()
            await protocol.when_disconnected().addBoth(lambda _: None)

    @as_deferred
    async def _use(self) -> None:
        if self._protocol is None:
            self._protocol = await self._add()
            log.info("the onion service is back at {hint}", hint=self.hint)
        await self._protocol.when_disconnected().addErrback(lambda _: None)

    def _lost(self, error: Exception | None) -> None:
        self._protocol = None
        if not self._stopped:
            log.warn(
                "the onion service is not reachable: {reason}; it is added again when Tor runs",
                reason=str(error) if error is not None else "the connection to Tor was lost",
            )

    async def _add(self) -> Any:
        """Add the service to Tor; returns the connection to Tor, which keeps the service."""
        control = self._settings.control
        if self._settings.find_control is not None:
            control = await self._settings.find_control(self._reactor)
        protocol = await connect_first(self._reactor, control)
        try:
            await self._add_over(protocol)
        except BaseException:
            protocol.transport.abortConnection()
            raise
        return protocol

    async def _add_over(self, protocol: Any) -> None:
        key = load_onion_key(self._settings.key)
        target = f"Port={self._settings.external_port},127.0.0.1:{self._local_port}"
        asked: Deferred[Any] = protocol.queue_command(
            f"ADD_ONION {key or 'NEW:ED25519-V3'} {target}"
        )
        try:
            answer = str(await asked.addTimeout(CONTROL_S, self._reactor))
        except CancelledError:
            raise
        except Exception as error:
            raise ConnectionError(
                f"Tor does not add the onion service: {reason_of(error)}"
            ) from None
        fields = dict(line.partition("=")[::2] for line in answer.splitlines())
        name, made = fields.get("ServiceID", ""), fields.get("PrivateKey", "").strip()
        if _SERVICE.match(name) is None or (key is None and _KEY.match(made) is None):
            raise ConnectionError("Tor does not say which onion service it added")
        hint = f"tor:{name}.onion:{self._settings.external_port}"
        if self.hint not in ("", hint):
            raise ConnectionError(f"Tor added the onion service {hint}, not {self.hint}")
        if key is None:
            _keep_onion_key(self._settings.key, made)
        self.hint = hint


def load_onion_key(path: Path) -> str | None:
    """
    Return the key of an onion service in Tor's format; None if there is no key yet.

    Raises:
        UsageError: the file cannot be read, or has no such key.
    """
    try:
        text = read_file(path, _MAX_KEY_BYTES).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if _KEY.match(text) is None:
        raise UsageError(
            f"{path} does not hold the key of an onion service of version 3; restore it, or remove it for a "
            "new name"
        )
    return text


def _keep_onion_key(path: Path, key: str) -> None:
    """
    Write a new key.

    Raises:
        UsageError: the key cannot be written, or another process has written another key.
    """
    try:
        create_file(path, (key + "\n").encode("ascii"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; free space there") from error
    if load_onion_key(path) != key:
        raise UsageError(
            f"another process has made {path} at the same time; start the server again"
        )


def check_onion_port(port: str, reachable: Callable[[str], bool]) -> None:
    """
    Check that the port of an onion service is reachable only from this machine.

    Args:
        reachable: returns whether an endpoint is reachable only from this machine.

    Raises:
        UsageError: the port is reachable from other machines.
    """
    for text in port.split(","):
        if not reachable(text.strip()):
            raise UsageError(
                f"with an onion service the server may only listen on this machine, and {text.strip()!r} is "
                "open to others; add :interface=127.0.0.1, or leave --port out"
            )
