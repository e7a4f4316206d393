"""Exchanges invitations through Magic Wormhole: with a short code, and over a relay that cannot read them."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError, succeed
from twisted.internet.endpoints import (
    TCP4ServerEndpoint,
    TCP6ServerEndpoint,
    wrapClientTLS,
)
from twisted.internet.ssl import optionsForClientTLS
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from wormhole import create
from wormhole._interfaces import ITorManager
from wormhole.errors import (
    KeyFormatError,
    LonelyError,
    ServerConnectionError,
    ServerError,
    WelcomeError,
    WormholeClosed,
    WrongPasswordError,
)
from zope.interface import implementer

from pipegrid.errors import InvitationError, PipegridError, UsageError
from pipegrid.grid.invitation_messages import (
    APP_ID,
    CLIENT,
    INVITER,
    MAX_MESSAGE_BYTES,
    OURS,
    AddReply,
    Invitation,
    JoinReply,
    abilities_message,
    checked_code,
    checked_relay,
    is_ours,
    parse_add_reply,
    parse_invitation,
    parse_join_reply,
)
from pipegrid.reactor.connection_policy import ConnectionPolicy
from pipegrid.reactor.deferreds import Waiters
from pipegrid.reactor.tcp_socks5_endpoints import endpoint_through
from pipegrid.wire.announcements import KnownServer, printable

# Both ends meet in a mailbox of a relay. They derive a key from the code (SPAKE2), so the relay sees only
# ciphertext. An attacker can guess the code only once: after a wrong guess both ends are notified, and the
# code cannot be used again. ``invitation_messages`` defines the messages; this module sends and receives
# them, with a time limit for each step and a bound on the bytes from the relay. This module writes no files.
#
# The library is optional (``pip install 'pipegrid[invite]'``); only commands that invite or join import this
# module.

CONNECT_S = 30.0
"""The time limit for reaching the relay."""

ANSWER_S = 60.0
"""Time limit for each answer of the other end after its first message; joiners may have to start a server."""

MEET_S = 30.0
"""How long a joiner waits for the inviter's first message; the inviter's command is running already."""

_CLOSE_S = 5.0
_MAX_RECEIVED_BYTES = 8 * MAX_MESSAGE_BYTES
"""Maximum number of bytes from the relay: a message arrives as hex digits, and again after reconnecting."""


class WormholeExchange:
    """
    One end of a wormhole.

    Every call that waits raises an ``InvitationError`` with one sentence if the relay or the other end fails,
    or if the call's time limit is reached. The caller closes the exchange in any case.

    Args:
        reactor: connects and measures time.
        relay_url: see ``checked_relay``.
        advice: the part of errors that says what to do when the code cannot be used again.
        policy: the permitted way to the relay.
    """

    def __init__(self, reactor: Any, relay_url: str, advice: str, policy: ConnectionPolicy) -> None:
        self._reactor = reactor
        self._relay_url = checked_relay(relay_url)
        self._advice = advice
        self._policy = policy
        self._dialer = _BoundedDialer(reactor, policy, self._give_up)
        self._waiting: Deferred[Any] | None = None
        self._resources = ExitStack()
        # The library prints exceptions that the relay causes, but standard output must have only results.
        self._resources.enter_context(redirect_stdout(io.StringIO()))
        try:
            self._wormhole: Any = create(APP_ID, self._relay_url, reactor, tor=self._dialer)
        except BaseException:
            self._resources.close()
            raise

    async def _start_proxy(self) -> None:
        """
        Start the proxy that leads to the relay, if the settings say that it must be started.

        Raises:
            InvitationError: the proxy does not start; no code was used.
        """
        if self._policy.starting is not None:
            try:
                await self._policy.starting(self._reactor)
            except ConnectionError as error:
                raise InvitationError(str(error)) from None

    async def new_code(self) -> str:
        """Return a new code, which is valid until this exchange is closed."""
        await self._start_proxy()
        self._wormhole.allocate_code()
        code: str = await self._wait(self._wormhole.get_code(), CONNECT_S, self._no_relay)
        return code

    async def use_code(self, code: str) -> None:
        """
        Connect to the relay, and enter the code that the other end made.

        Raises:
            UsageError: the text is not a code.
        """
        await self._start_proxy()
        try:
            self._wormhole.set_code(checked_code(code))
        except KeyFormatError:
            raise UsageError(f"{code[:40]!r} is not a code; copy all of it") from None
        await self._wait(self._wormhole.get_welcome(), CONNECT_S, self._no_relay)

    def send(self, message: bytes) -> None:
        """Send a message; the library sends it once the other end has connected."""
        self._wormhole.send_message(message)

    async def receive(self, timeout_s: float, silence: str) -> bytes:
        """
        Return the next message of the other end.

        Args:
            timeout_s: the time limit.
            silence: the sentence of the error if no message comes in time.
        """

        def late() -> InvitationError:
            if not self._dialer.connected:
                return InvitationError(
                    f"the connection to the relay {self._relay_url} was lost; {self._advice}"
                )
            return InvitationError(silence)

        message: bytes = await self._wait(self._wormhole.get_message(), timeout_s, late)
        return message

    async def close(self) -> None:
        """
        Leave the mailbox, so that the code cannot be used again; waits at most a few seconds for the relay.
        """
        try:
            closing = self._wormhole.close().addTimeout(_CLOSE_S, self._reactor)
            with suppress(Exception):  # an error was reported already, or no longer matters
                await closing
        finally:
            self._dialer.stop()
            await self._stop_reconnecting()
            self._resources.close()

    async def _stop_reconnecting(self) -> None:
        """
        Stop the library's reconnecting, which would go on for ever if the relay does not let the library
        finish.
        """
        with suppress(AttributeError):  # private names; needed only with a bad relay
            await self._wormhole._boss._RC._connector.stopService()

    def _give_up(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    async def _wait(
        self, waiting: Deferred[Any], timeout_s: float, late: Callable[[], Exception]
    ) -> Any:
        self._waiting = waiting
        try:
            return await waiting.addTimeout(timeout_s, self._reactor)
        except TimeoutError:
            raise late() from None
        except CancelledError as error:
            if self._dialer.exceeded:
                raise self._explained(error) from None
            raise
        except PipegridError:
            raise
        except Exception as error:
            raise self._explained(error) from error
        finally:
            self._waiting = None

    def _no_relay(self) -> InvitationError:
        return InvitationError(
            f"the relay {self._relay_url} does not answer; try again, name another relay, or ask for a new "
            "code if it is the inviter's own"
        )

    def _explained(self, error: Exception) -> InvitationError:
        """Return the error for the user that explains an error of the library."""
        relay = f"the relay {self._relay_url}"
        if self._dialer.exceeded:
            return InvitationError(f"{relay} sends too much; name another relay")
        if isinstance(error, WrongPasswordError):
            return InvitationError(
                f"the code was entered wrongly, or guessed, and cannot be used again; {self._advice}"
            )
        if isinstance(error, ServerConnectionError):
            why = printable(str(error).rstrip("."))
            return InvitationError(
                f"cannot reach {relay} ({why}); if it is the inviter's own, the code was used or has "
                "expired: ask for a new one; else check the address"
            )
        if isinstance(error, ServerError) and "crowded" in str(error):
            return InvitationError(
                f"the code was used by more than two, and cannot be used again; {self._advice}"
            )
        if isinstance(error, (ServerError, WelcomeError)):
            return InvitationError(
                f"{relay} refuses: {printable(str(error))!r}; name another relay"
            )
        if isinstance(error, (LonelyError, WormholeClosed)):
            return InvitationError(f"the other end left; {self._advice}")
        return InvitationError(
            f"{relay} sent what makes no sense; {self._advice}, or name another relay"
        )


@implementer(ITorManager)
class _BoundedDialer:
    """
    Connects a wormhole to its relay, and bounds the bytes that the relay may send. The library calls this
    object instead of its manager of Tor connections.

    Args:
        policy: the permitted way to the relay.
        give_up: called when the relay has sent too much.

    Attributes:
        connected: whether there is a connection.
        exceeded: whether the relay has sent too much; if so, nothing more is received.
    """

    def __init__(self, reactor: Any, policy: ConnectionPolicy, give_up: Callable[[], None]) -> None:
        self.connected = False
        self.exceeded = False
        self._reactor = reactor
        self._policy = policy
        self._give_up = give_up
        self._left_bytes = _MAX_RECEIVED_BYTES
        self._protocols: set[Any] = set()

    def stream_via(self, host: str, port: int, tls: bool = False) -> _RelayEndpoint:
        """Return the endpoint of the relay; the library calls this method."""
        endpoint: Any = endpoint_through(self._policy, self._reactor, host, port)
        if tls:
            endpoint = wrapClientTLS(optionsForClientTLS(host), endpoint)
        return _RelayEndpoint(endpoint, self)

    def stop(self) -> None:
        """Abort all open connections, even if the relay no longer responds."""
        for protocol in tuple(self._protocols):
            protocol.transport.abortConnection()

    def watch(self, protocol: Any) -> Any:
        """Make a protocol count the bytes that it receives; returns the protocol."""
        receive, lose = protocol.dataReceived, protocol.connectionLost
        self.connected = True
        self._protocols.add(protocol)

        def received(data: bytes) -> None:
            self._left_bytes -= len(data)
            if self._left_bytes >= 0:
                receive(data)
            else:
                self.exceeded = True
                protocol.transport.abortConnection()
                self._give_up()

        def lost(reason: Any) -> None:
            self.connected = False
            self._protocols.discard(protocol)
            lose(reason)

        protocol.dataReceived, protocol.connectionLost = received, lost
        return protocol


class _RelayEndpoint:
    """The endpoint of the relay; the bytes that its connections receive are counted."""

    def __init__(self, endpoint: Any, dialer: _BoundedDialer) -> None:
        self._endpoint = endpoint
        self._dialer = dialer

    def connect(self, factory: Any) -> Any:
        build = factory.buildProtocol
        factory.buildProtocol = lambda address: self._dialer.watch(build(address))
        return self._endpoint.connect(factory)


# The messages between inviter and joiner, over an open exchange.


async def invite(
    exchange: WormholeExchange,
    invitation: Invitation,
    expires_s: float,
    add: Callable[[KnownServer], AddReply],
) -> tuple[bool, JoinReply | None]:
    """
    Give an invitation to the end that has the code, once.

    Args:
        expires_s: how long the code is valid.
        add: adds a joiner's server to the inviter's list.

    Returns:
        whether the joiner is PipeGrid, and the joiner's last answer; None for Tahoe-LAFS, which does not
            answer.

    Raises:
        InvitationError: the code has expired or was entered wrongly, or the joiner does not answer or sends
            nonsense.
    """
    exchange.send(abilities_message(INVITER, OURS))
    expired = (
        f"the code was not used within {expires_s / 60:.0f} minutes, and has expired; run 'pipegrid invite' "
        "again"
    )
    ours = is_ours(await exchange.receive(expires_s, expired), CLIENT)
    exchange.send(invitation.as_message())
    if not ours:
        return False, None
    silence = (
        "the joining end has the invitation, and does not say whether it has joined; ask the person, or run "
        "'pipegrid invite' again"
    )
    reply = parse_join_reply(await exchange.receive(ANSWER_S, silence))
    if reply.server is not None:
        exchange.send(add(reply.server).as_message())
        reply = parse_join_reply(await exchange.receive(ANSWER_S, silence))
    return True, reply


async def take(exchange: WormholeExchange, code: str) -> tuple[Invitation, bool]:
    """
    Return the invitation for a code, and whether the inviter is PipeGrid and waits for an answer.

    Raises:
        UsageError: the text is not a code.
        InvitationError: the code is wrong, used or expired, or the inviter sends nonsense.
    """
    await exchange.use_code(code)
    exchange.send(abilities_message(CLIENT, OURS))
    nobody = (
        f"no inviter answered within {MEET_S:.0f} s: the code was used before, has expired, or its number is "
        "wrong; ask for a new code"
    )
    ours = is_ours(await exchange.receive(MEET_S, nobody), INVITER)
    silence = "the inviter does not send its invitation; ask for a new code"
    return parse_invitation(await exchange.receive(ANSWER_S, silence)), ours


async def offer_server(exchange: WormholeExchange, server: KnownServer) -> AddReply:
    """
    Ask a PipeGrid inviter to add a server to its list.

    Raises:
        InvitationError: the inviter does not answer, or sends nonsense.
    """
    exchange.send(JoinReply(True, server).as_message())
    silence = "the inviter does not say whether it has added the server; ask for a new code"
    return parse_add_reply(await exchange.receive(ANSWER_S, silence))


# A relay in this process, for networks in which no public relay can be reached.

_LEAVE_S = 3.0
_MAX_CONNECTIONS = 32
_MAX_RELAYED_BYTES = 64 << 20


class Relay:
    """
    A mailbox server that runs for the time of one invitation.

    Attributes:
        url: the relay's address for other machines.
        url_here: the relay's address on this machine.
    """

    def __init__(self, reactor: Any, url: str, url_here: str, port: Any, service: Any) -> None:
        self._reactor = reactor
        self.url = url
        self.url_here = url_here
        self._port = port
        self._service = service

    async def stop(self) -> None:
        """
        Stop the relay and its connections.

        An end that has read the last message may still be leaving the mailbox; only when it has left does it
        learn how the exchange ended. So the relay waits a few seconds for the ends to leave.
        """
        if self._service.running:
            await self._port.stopListening()
            with suppress(TimeoutError):
                await self._port.factory.when_unused().addTimeout(_LEAVE_S, self._reactor)
            self._service.stopService()
            for each in tuple(self._port.factory.protocols):
                each.transport.abortConnection()


async def start_relay(reactor: Any, host: str, port: int, interface: str = "") -> Relay:
    """
    Start a relay.

    Args:
        host: this machine's name or address for other machines.
        port: a TCP port; 0: any free one.
        interface: the address to listen on; empty: all.

    Raises:
        UsageError: the port cannot be used.
    """
    from wormhole_mailbox_server.database import create_or_upgrade_channel_db
    from wormhole_mailbox_server.server import make_server
    from wormhole_mailbox_server.web import make_web_server

    service = make_server(create_or_upgrade_channel_db(":memory:"))
    limits = {
        "maxFramePayloadSize": 4 * MAX_MESSAGE_BYTES,
        "maxMessagePayloadSize": 4 * MAX_MESSAGE_BYTES,
    }
    site = make_web_server(service, False, tuple(limits.items()))
    endpoint = TCP6ServerEndpoint if ":" in interface else TCP4ServerEndpoint
    try:
        listening: Any = await endpoint(reactor, port, interface=interface).listen(
            _BoundedRelay(site)
        )
    except Exception as error:  # such as CannotListenError
        why = str(error).rstrip(".")
        raise UsageError(
            f"cannot listen on port {port} for a relay: {why}; choose another"
        ) from error
    service.startService()
    url, url_here = (
        f"ws://{f'[{each}]' if ':' in each else each}:{listening.getHost().port}/v1"
        for each in (host, interface or "127.0.0.1")
    )
    return Relay(reactor, url, url_here, listening, service)


class _RelayConnection(ProtocolWrapper):
    """A connection to this process's relay; it is aborted if all connections together receive too much."""

    def dataReceived(self, data: bytes) -> None:
        factory: Any = self.factory
        factory.left_bytes -= len(data)
        if factory.left_bytes >= 0:
            super().dataReceived(data)
        else:
            transport: Any = self.transport
            transport.abortConnection()


class _BoundedRelay(WrappingFactory):
    """
    Bounds the relay's connections and the bytes that the relay receives, since it keeps messages in memory.
    """

    protocol = _RelayConnection
    noisy = False

    def __init__(self, site: Any) -> None:
        super().__init__(site)
        self.left_bytes = _MAX_RELAYED_BYTES
        self._unused: Waiters[None] = Waiters()

    def when_unused(self) -> Deferred[None]:
        """Return a Deferred that fires when there are no connections."""
        return self._unused.wait() if self.protocols else succeed(None)

    def unregisterProtocol(self, p: Any) -> None:
        super().unregisterProtocol(p)
        if not self.protocols:
            self._unused.fire(None)

    def buildProtocol(self, addr: Any) -> Any:
        return super().buildProtocol(addr) if len(self.protocols) < _MAX_CONNECTIONS else None
