"""
The SFTP server of a grid: SSH by Twisted Conch, with SFTP as the only service, and with limits on what
clients send.

Conch opens a channel's window again before the received bytes were used, and waits ten hours for a login;
this module replaces both behaviours.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from twisted.conch.error import ConchError, ValidPublicKey
from twisted.conch.interfaces import IConchUser
from twisted.conch.ssh.channel import SSHChannel
from twisted.conch.ssh.common import getNS
from twisted.conch.ssh.connection import (
    EXTENDED_DATA_STDERR,
    OPEN_ADMINISTRATIVELY_PROHIBITED,
    OPEN_RESOURCE_SHORTAGE,
    SSHConnection,
)
from twisted.conch.ssh.factory import SSHFactory
from twisted.conch.ssh.keys import BadKeyError, EncryptedKeyError, Key
from twisted.conch.ssh.transport import (
    DISCONNECT_PROTOCOL_ERROR,
    SSHServerTransport,
)
from twisted.conch.ssh.userauth import SSHUserAuthServer
from twisted.cred.credentials import ISSHPrivateKey, IUsernamePassword
from twisted.cred.error import UnauthorizedLogin
from twisted.internet.defer import Deferred, execute
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.logger import ILogObserver, Logger
from twisted.python.failure import Failure
from zope.interface import implementer, provider

from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import create_file
from pipegrid.disk.private_files import PRIVATE_DIRECTORY, make_directory
from pipegrid.errors import UsageError
from pipegrid.gateway.gateway_settings import SftpSettings
from pipegrid.gateway.sftp.accounts import Account, Accounts
from pipegrid.gateway.sftp.file_writer import TemporarySpace, WrittenFiles
from pipegrid.gateway.sftp.sftp_session import SftpSession
from pipegrid.gateway.sftp.sftp_tree import AccountTree
from pipegrid.reactor.deferreds import timeout_or
from pipegrid.tree.directory_views import DirectoryViews
from pipegrid.tree.read_ahead import ReadSpace
from pipegrid.tree.tree_grid import Grid

LOGIN_S = 120.0
"""A client that has not logged in after this time is disconnected."""

MOST_CONNECTIONS = 256
MOST_LOGINS = 64
"""Maximum number of connections without a login; a further one closes the oldest of them."""

MOST_CHANNELS = 8
"""Maximum number of channels per connection."""

MOST_ATTEMPTS = 20
"""Maximum number of failed login requests per connection: clients offer their keys one after the other."""

MOST_PASSWORDS = 5
"""Maximum number of passwords that a client may try per connection."""

FAILURES, FAILURE_S = 20, 6.0
"""Maximum number of wrong passwords from one address, and the seconds after which one is forgotten."""

_MOST_ADDRESSES = 1000

MOST_SESSIONS = 320
FULL_SESSIONS = 32
"""Number of sessions that get a window of ``WINDOW_BYTES``; further sessions get ``SMALL_WINDOW_BYTES``."""

WINDOW_BYTES = 2 << 20
"""Receive window of a channel: how many bytes a client may send before the server has used them."""

SMALL_WINDOW_BYTES = 256 << 10

_PACKET_BYTES = 32 << 10
_LEAST_PACKET_BYTES = 1024
_LOGIN_BUFFER_BYTES = 40_000
"""Maximum bytes of an incomplete packet before login; SSH servers must accept packets nearly this long."""

_BUFFER_BYTES = 320 << 10
STALLED_S = 600.0
"""A client that accepts no bytes for this long is disconnected."""

_CLOSE_S = 10.0
NO_SHELL = (
    "this server has files only, no shell and no commands; use sftp, sshfs, or scp without -O"
)
_CLIENT_ALGORITHMS = (
    b"ssh-ed25519",
    b"sk-ssh-ed25519@openssh.com",
    b"ecdsa-sha2-nistp256",
    b"ecdsa-sha2-nistp384",
    b"ecdsa-sha2-nistp521",
    b"sk-ecdsa-sha2-nistp256@openssh.com",
    b"rsa-sha2-512",
    b"rsa-sha2-256",
)
"""Signature algorithms that clients may use; none of them uses SHA-1."""

log = Logger()

MakeSession = Callable[["SftpChannel", Account], SftpSession]


@provider(ILogObserver)
def _ignored(event: Any) -> None:
    """Ignore an event that Conch logs."""


class LoginLimit:
    """Counts wrong passwords by address; one of them is forgotten every ``FAILURE_S``."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def _level(self, host: str) -> float:
        count, since = self._failed.get(host, (0.0, 0.0))
        return max(0.0, count - (self._clock.seconds() - since) / FAILURE_S)

    def may_try(self, host: str) -> bool:
        """Return whether passwords from an address are checked now, or refused."""
        return self._level(host) < FAILURES

    def count(self, host: str, change: int) -> None:
        """Count a wrong password from an address (1), or take back that count (-1)."""
        self._failed[host] = max(0.0, self._level(host) + change), self._clock.seconds()
        self._failed.move_to_end(host)
        while len(self._failed) > _MOST_ADDRESSES:
            self._failed.popitem(last=False)


@implementer(IConchUser)
@attrs.define(eq=False)
class Login:
    """A client that has logged in to an account."""

    account: Account
    conn: Any = None

    def lookupChannel(self, *arguments: object) -> None:
        """See ``IConchUser``; does nothing, since ``SftpConnection`` opens the channels."""

    def lookupSubsystem(self, *arguments: object) -> None: ...

    def gotGlobalRequest(self, requestType: bytes, data: bytes) -> int:
        """Refuse all global requests, such as a request to listen on a port."""
        return 0


class AccountPortal:
    """Checks passwords and public keys; has the methods of Twisted's ``Portal``, and replaces it."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def listCredentialsInterfaces(self) -> list[Any]:
        """Return the kinds of credentials that are accepted now; the accounts file may have changed."""
        passwords = [IUsernamePassword] if self._accounts.have_passwords else []
        return [ISSHPrivateKey, *passwords]

    def login(self, credentials: Any, mind: object, *interfaces: Any) -> Deferred[Any]:
        """Fire with Conch's triple for the client's account, or fail with UnauthorizedLogin."""
        return execute(self._check, credentials).addCallback(self._logged_in)

    def _check(self, credentials: Any) -> Account:
        name = credentials.username.decode("utf-8", "replace")
        if IUsernamePassword.providedBy(credentials):
            found = self._accounts.with_password(name, credentials.password)
            if found is None:
                raise UnauthorizedLogin("wrong password")
            return found
        found = self._accounts.with_key(name, credentials.blob)
        if found is None:
            raise UnauthorizedLogin("no such key")
        if credentials.signature is None:
            raise ValidPublicKey()
        kind = getNS(credentials.signature)[0]
        try:
            good = kind in _CLIENT_ALGORITHMS and Key.fromString(credentials.blob).verify(
                credentials.signature, credentials.sigData
            )
        except (BadKeyError, ValueError, TypeError, IndexError, KeyError, struct.error):
            good = False
        if not good:
            raise UnauthorizedLogin("wrong signature")
        return found

    def _logged_in(self, account: Account) -> tuple[Any, ...]:
        log.info("SFTP: {name!r} has logged in", name=printable(account.name))
        return IConchUser, Login(account), lambda: None


class SftpUserAuth(SSHUserAuthServer):
    """Limits the attempts and the time of a client's login."""

    _log = Logger(observer=_ignored)
    loginTimeout = int(LOGIN_S)
    attemptsBeforeDisconnect = MOST_ATTEMPTS
    transport: Any

    def serviceStarted(self) -> None:
        self.clock = self.transport.factory.clock
        self._requests = self._passwords = 0
        super().serviceStarted()

    def ssh_USERAUTH_REQUEST(self, packet: bytes) -> Deferred[Any] | None:
        self._requests += 1
        if self._requests > 3 * MOST_ATTEMPTS:
            self.transport.sendDisconnect(DISCONNECT_PROTOCOL_ERROR, b"too many attempts")
            return None
        return super().ssh_USERAUTH_REQUEST(packet)

    def auth_password(self, packet: bytes) -> Deferred[Any]:
        """
        See ``SSHUserAuthServer``; after too many wrong passwords from an address, passwords are refused.
        """
        limit, host = self.transport.factory.limit, self.transport.host
        self._passwords += 1
        if self._passwords > MOST_PASSWORDS or not limit.may_try(host):
            refused: Deferred[Any] = Deferred()
            self.clock.callLater(self.passwordDelay, refused.errback, UnauthorizedLogin("too many"))
            return refused
        # A password counts as wrong until it is found right, since the client can try others at the same
        # time.
        limit.count(host, 1)

        def succeeded(result: Any) -> Any:
            limit.count(host, -1)
            return result

        trying: Deferred[Any] = super().auth_password(packet)
        return trying.addCallback(succeeded)


class SftpChannel(SSHChannel):
    """
    One SSH channel, which becomes an SFTP session if the client requests that; implements
    ``sftp_session.Channel``.

    Attributes:
        window_is_full: whether the client accepts no more bytes on this channel now.
    """

    _log = Logger(observer=_ignored)
    name = b"session"
    conn: Any

    def __init__(
        self, window: int, remote_window: int, remote_packet: int, account: Account
    ) -> None:
        super().__init__(
            localWindow=window,
            localMaxPacket=_PACKET_BYTES,
            remoteWindow=remote_window,
            remoteMaxPacket=remote_packet,
        )
        self.session: SftpSession | None = None
        self._account = account
        self._unused = 0
        self._refused = False
        self.window_is_full = False

    @property
    def is_blocked(self) -> bool:
        return self.window_is_full or bool(self.conn.transport.is_blocked)

    def stopWriting(self) -> None:
        """Note that the client's receive window is full."""
        self.window_is_full = True
        self.conn.transport.watch_progress()

    def startWriting(self) -> None:
        """Note that the client's receive window has space again."""
        self.window_is_full = False

    def addWindowBytes(self, data: int) -> None:
        self.conn.transport.made_progress()
        super().addWindowBytes(data)
        self.resume()

    def resume(self) -> None:
        """Let the session continue, unless bytes still wait to be sent."""
        if self.session is not None and not self.buf:
            self.session.resume()

    def dataReceived(self, data: bytes) -> None:
        if self.session is not None:
            self.session.received(data)

    def extReceived(self, dataType: int, data: bytes) -> None:
        """Ignore extended data, and let the client send the same number of bytes again."""
        self.consumed(len(data))

    def consumed(self, count: int) -> None:
        self._unused += count
        if self._unused >= self.localWindowSize // 4 and not self.localClosed:
            self.conn.adjustWindow(self, self._unused)
            self._unused = 0

    def request_subsystem(self, data: bytes) -> int:
        if self.session is not None or getNS(data)[0] != b"sftp":
            return 0
        self.session = self.conn.transport.factory.make_session(self, self._account)
        return 1

    def request_shell(self, data: bytes) -> int:
        """Refuse a shell or a command: accept the request, then send a message and close the channel."""
        if self.session is not None or self._refused:
            return 0
        self._refused = True
        self.conn.transport.factory.clock.callLater(0, self._say_and_close)
        return 1

    request_exec = request_shell

    def _say_and_close(self) -> None:
        if not self.localClosed:
            self.writeExtended(EXTENDED_DATA_STDERR, NO_SHELL.encode("ascii") + b"\r\n")
            self.finish(1)

    def finish(self, status: int = 0) -> None:
        """Close the channel with an exit status; without one, some clients report a failure."""
        if not self.localClosed:
            self.conn.sendRequest(self, b"exit-status", struct.pack(">L", status))
            self.conn.sendEOF(self)
            self.loseConnection()

    def request_pty_req(self, data: bytes) -> int:
        """Accept a terminal; otherwise the client would not show the message that there is no shell."""
        return 1

    def eofReceived(self) -> None:
        """Finish the requests that have arrived, since the client sends no more; then close the channel."""
        if self.session is not None:
            self.session.ended()
        elif not self._refused:
            self.finish()

    def closed(self) -> None:
        self.conn.transport.factory.sessions -= 1
        session, self.session = self.session, None
        self.buf = b""
        if session is not None:
            session.closed()


class SftpConnection(SSHConnection):
    """The channels of one client: at most ``MOST_CHANNELS``, all of type session."""

    _log = Logger(observer=_ignored)
    transport: Any

    def getChannel(self, channelType: bytes, windowSize: int, maxPacket: int, data: bytes) -> Any:
        if channelType != b"session":
            raise ConchError("only sessions are possible", OPEN_ADMINISTRATIVELY_PROHIBITED)
        if len(self.channels) >= MOST_CHANNELS or maxPacket < _LEAST_PACKET_BYTES:
            raise ConchError("too many channels, or too small packets", OPEN_RESOURCE_SHORTAGE)
        sessions = self.transport.factory.sessions
        if sessions >= MOST_SESSIONS:
            raise ConchError("too many sessions", OPEN_RESOURCE_SHORTAGE)
        window = WINDOW_BYTES if sessions < FULL_SESSIONS else SMALL_WINDOW_BYTES
        self.transport.factory.sessions += 1
        packet = min(maxPacket, _PACKET_BYTES)
        channel = SftpChannel(window, windowSize, packet, self.transport.avatar.account)
        channel.conn = self
        return channel

    def ssh_CHANNEL_DATA(self, packet: bytes) -> None:
        """See ``SSHConnection``; but the window opens again only after the bytes were used."""
        number, length = struct.unpack(">2L", packet[:8])
        channel = self.channels[number]
        if length > min(channel.localWindowLeft, channel.localMaxPacket):
            self.sendClose(channel)
            return
        channel.localWindowLeft -= length
        channel.dataReceived(getNS(packet[4:])[0])

    def ssh_CHANNEL_EXTENDED_DATA(self, packet: bytes) -> None:
        number, kind, length = struct.unpack(">3L", packet[:12])
        channel = self.channels[number]
        if length > min(channel.localWindowLeft, channel.localMaxPacket):
            self.sendClose(channel)
            return
        channel.localWindowLeft -= length
        channel.extReceived(kind, getNS(packet[8:])[0])

    def resume(self) -> None:
        """Let all channels continue, since the connection accepts bytes again."""
        for channel in list(self.channels.values()):
            channel.resume()


class SftpTransport(SSHServerTransport):
    """
    One connection of a client.

    Attributes:
        host: the client's address.
        is_blocked: whether bytes would have to wait before they are sent.
    """

    # Conch logs much, in its own style; this module logs what operators need.
    _log = Logger(observer=_ignored)
    version = b"PipeGrid"
    ourVersionString = b"SSH-2.0-PipeGrid"
    supportedCompressions = [b"none"]
    factory: SftpFactory
    service: Any
    transport: Any

    def __init__(self) -> None:
        self.host = ""
        self._exchanges = 0
        self._exchanging = False
        self._paused = False
        self._ended = False
        self._login_timer: IDelayedCall | None = None
        self._stall_timer: IDelayedCall | None = None
        self._progressed_s = 0.0

    @property
    def is_blocked(self) -> bool:
        return self._paused or self._exchanging or self._ended

    @property
    def has_login(self) -> bool:
        """Whether the client has logged in."""
        return hasattr(self, "avatar")

    def connectionMade(self) -> None:
        self.host = getattr(self.transport.getPeer(), "host", "")
        self.transport.registerProducer(self, True)
        self._login_timer = self.factory.clock.callLater(LOGIN_S, self._login_is_late)
        self.factory.opened(self)
        super().connectionMade()

    def _login_is_late(self) -> None:
        if not self.has_login:
            self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        self._ended = True
        self.transport.abortConnection()

    def connectionLost(self, reason: Failure | None = None) -> None:
        self._ended = True
        for timer in (self._login_timer, self._stall_timer):
            if timer is not None and timer.active():
                timer.cancel()
        self.factory.connections.pop(self, None)
        super().connectionLost(reason)
        # The connection is part of reference cycles, which would keep its buffer until the garbage collector
        # runs.
        self.buf = b""
        self.service = None

    def dataReceived(self, data: bytes) -> None:
        """See ``SSHServerTransport``; malformed input closes the connection."""
        if self._ended:
            return
        try:
            super().dataReceived(data)
        except Exception as error:
            # Conch assumes that its input is well-formed, so any exception means that the input is malformed.
            log.info(
                "an SSH client at {host} sent malformed data ({kind}) and was disconnected",
                host=self.host,
                kind=type(error).__name__,
            )
            self.abort()
            return
        if len(self.buf) > (_BUFFER_BYTES if self.has_login else _LOGIN_BUFFER_BYTES):
            self.abort()

    def sendDisconnect(self, reason: int, desc: bytes) -> None:
        """
        See ``SSHServerTransport``; closes the connection after ``_CLOSE_S`` even if the client does not read.
        """
        if not self._ended:
            super().sendDisconnect(reason, desc)
            self._ended = True
            self.factory.clock.callLater(_CLOSE_S, self.transport.abortConnection)

    def receiveError(self, reasonCode: int, description: bytes) -> None:
        """Do nothing: the client reports why it disconnects, which is not an error."""

    def sendExtInfo(self, extensions: list[tuple[bytes, bytes]]) -> None:
        """
        See ``SSHTransportBase``; sends the signature algorithms that clients may use, which differ from the
        server's.
        """
        super().sendExtInfo([(b"server-sig-algs", b",".join(_CLIENT_ALGORITHMS))])

    def ssh_KEXINIT(self, packet: bytes) -> None:
        """See ``SSHServerTransport``; before the login, only one key exchange is allowed."""
        self._exchanges += 1
        if self._exchanges > 1 and not self.has_login:
            self.sendDisconnect(DISCONNECT_PROTOCOL_ERROR, b"log in first")
            return
        self._exchanging = True
        super().ssh_KEXINIT(packet)

    def ssh_NEWKEYS(self, packet: bytes) -> None:
        super().ssh_NEWKEYS(packet)
        self._exchanging = False
        self._resume()

    # Called by the TCP transport, whose producer this object is.

    def pauseProducing(self) -> None:
        """Note that the client does not read."""
        self._paused = True
        self.watch_progress()

    def resumeProducing(self) -> None:
        self._paused = False
        self.made_progress()
        self._resume()

    def stopProducing(self) -> None: ...

    def _resume(self) -> None:
        if isinstance(self.service, SftpConnection) and not self.is_blocked:
            self.service.resume()

    def watch_progress(self) -> None:
        """Close the connection if the client accepts no bytes for ``STALLED_S``."""
        if self._stall_timer is None and not self._ended:
            self._progressed_s = self.factory.clock.seconds()
            self._stall_timer = self.factory.clock.callLater(STALLED_S, self._check_progress)

    def made_progress(self) -> None:
        self._progressed_s = self.factory.clock.seconds()

    def _check_progress(self) -> None:
        self._stall_timer = None
        channels = self.service.channels.values() if self.has_login else ()
        if not self._paused and not any(each.window_is_full for each in channels):
            return
        silence_s = self.factory.clock.seconds() - self._progressed_s
        if silence_s >= STALLED_S:
            self.abort()
        else:
            left_s = STALLED_S - silence_s
            self._stall_timer = self.factory.clock.callLater(left_s, self._check_progress)


class SftpFactory(SSHFactory):
    """
    Accepts connections of clients.

    Args:
        accounts: the accounts that may log in.
        key: the server's host key.
        make_session: begins an SFTP session of an account on a channel.
    """

    _log = Logger(observer=_ignored)
    noisy = False
    protocol = SftpTransport
    services = {b"ssh-userauth": SftpUserAuth, b"ssh-connection": SftpConnection}

    def __init__(
        self, clock: IReactorTime, accounts: Accounts, key: Key, make_session: MakeSession
    ) -> None:
        self.clock = clock
        self.make_session = make_session
        self.limit = LoginLimit(clock)
        self.portal = AccountPortal(accounts)
        self.publicKeys = {key.sshType(): key.public()}
        self.privateKeys = {key.sshType(): key}
        self.primes = None
        self.connections: dict[SftpTransport, None] = {}
        self.sessions = 0

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """See ``SSHFactory``; returns None if too many connections are open."""
        if len(self.connections) >= MOST_CONNECTIONS + MOST_LOGINS:
            return None
        made = super().buildProtocol(addr)
        made.supportedCiphers = _only(made.supportedCiphers, b"-ctr")
        made.supportedMACs = _only(made.supportedMACs, b"hmac-sha2")
        made.supportedKeyExchanges = _only(
            made.supportedKeyExchanges, b"curve25519", b"x25519", b"ecdh-sha2-nistp"
        )
        made.supportedPublicKeys = [
            name for name in made.supportedPublicKeys if name not in (b"ssh-rsa", b"ssh-dss")
        ]
        return made

    def opened(self, connection: SftpTransport) -> None:
        """
        Record a new connection; if too many clients have not logged in, close the oldest of their
        connections.
        """
        self.connections[connection] = None
        waiting = [each for each in self.connections if not each.has_login]
        if len(waiting) > MOST_LOGINS:
            waiting[0].abort()

    def disconnect_all(self) -> None:
        """End all connections of clients."""
        for connection in list(self.connections):
            connection.abort()


def _only(names: list[bytes], *parts: bytes) -> list[bytes]:
    return [name for name in names if any(part in name for part in parts)]


# The host key: created at the first start, and kept from then on.

_RSA_BITS = 3072
_MOST_KEY_BYTES = 64 << 10


def host_key(private: Path, public: Path) -> Key:
    """
    Return the server's host key; if it does not exist, create it, with its public half.

    A new key is Ed25519, unless the file name contains ``ecdsa`` or ``rsa``.

    Raises:
        UsageError: a file cannot be read or created, or does not contain a usable key.
    """
    try:
        if not private.exists():
            make_directory(private.parent, PRIVATE_DIRECTORY)
            create_file(private, _new_key(private.name).toString("openssh"), mode=0o600)
        key = _read_key(private)
        if not public.exists():
            create_file(public, key.public().toString("openssh") + b"\n", mode=0o644)
    except OSError as error:
        raise UsageError(
            f"cannot read or make the SFTP server's key {error.filename or private} ({error.strerror})"
        ) from error
    return key


def _new_key(name: str) -> Key:
    if "ecdsa" in name:
        return Key(ec.generate_private_key(ec.SECP256R1()))
    if "rsa" in name:
        return Key(rsa.generate_private_key(public_exponent=65537, key_size=_RSA_BITS))
    return Key(ed25519.Ed25519PrivateKey.generate())


def _read_key(path: Path) -> Key:
    with path.open("rb") as file:
        data = file.read(_MOST_KEY_BYTES)
    try:
        key: Key = Key.fromString(data)
        usable = not key.isPublic() and key.sshType() != b"ssh-dss"
    except EncryptedKeyError:
        raise UsageError(
            f"the SFTP server's key {path} has a passphrase; remove that with 'ssh-keygen -p -f'"
        ) from None
    except (BadKeyError, ValueError, TypeError, IndexError, KeyError):
        usable = False
    if not usable:
        raise UsageError(
            f"{path} is not a private key that an SSH server can use; move it away, and a new one is made"
        )
    return key


_UNKNOWN_SPACE_BYTES = 1 << 50
_SPACE_S = 30.0


TEMPORARY_BYTES = 64 << 30
"""Maximum temporary space of all files that are being written."""


class FreeSpaceMeter:
    """Reports how much a grid can still store; queries the servers at most every ``_SPACE_S``."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._known = _UNKNOWN_SPACE_BYTES
        self._asked_at: float | None = None

    async def __call__(self) -> int:
        """Return how many bytes of files fit into the servers' free space; 1 PiB until that is known."""
        now = self._grid.clock.seconds()
        if self._asked_at is None or now - self._asked_at > _SPACE_S:
            self._asked_at = now
            found = [
                each.available_bytes
                for each in await self._grid.status()
                if each.reachable and not each.no_uploads and each.available_bytes is not None
            ]
            if found:
                params = self._grid.config.params
                # Storage directories on one machine share one disk.
                total = min(found) if self._grid.config.is_on_this_machine else sum(found)
                self._known = total * params.required_shares // params.total_shares
        return self._known


class SftpServer:
    """
    The SFTP server of a grid.

    Args:
        grid: an open grid, which the server does not close.
        accounts: the accounts that may log in, with their directories.
        key: the server's host key; see ``host_key``.
        directory: directory for temporary files.

    Attributes:
        factory: makes connections; the endpoint listens with it.
    """

    def __init__(self, grid: Grid, accounts: Accounts, key: Key, directory: Path) -> None:
        self._grid = grid
        self._views = DirectoryViews(grid)
        self._files = WrittenFiles(grid, self._views, TemporarySpace(directory, TEMPORARY_BYTES))
        self._reading = ReadSpace()
        self._free_space = FreeSpaceMeter(grid)
        self.factory = SftpFactory(grid.clock, accounts, key, self._session)

    def _session(self, channel: SftpChannel, account: Account) -> SftpSession:
        tree = AccountTree(self._grid, account.cap, self._views, self._files)
        return SftpSession(channel, tree, self._reading, self._free_space)

    async def stop(self, ending_s: float) -> None:
        """
        Wait until the files that clients have closed are stored, then disconnect the clients.

        Args:
            ending_s: maximum wait; files that are not stored then are lost, which is logged.
        """
        await timeout_or(self._files.stored(), ending_s, self._grid.clock)
        left = self._files.count
        if left:
            log.warn(
                "{count} files that SFTP clients were writing are not stored, since the gateway stops",
                count=left,
            )
        self.factory.disconnect_all()


def open_sftp(grid: Grid, settings: SftpSettings, directory: Path) -> SftpServer:
    """
    Return the SFTP server of a gateway.

    Args:
        directory: directory for temporary files; created if missing.

    Raises:
        UsageError: the accounts file or the host key cannot be read, or a file cannot be created.
    """
    accounts = Accounts(settings.accounts)
    key = host_key(settings.private_key, settings.public_key)
    try:
        make_directory(directory, PRIVATE_DIRECTORY)
    except OSError as error:
        raise UsageError(
            f"cannot make {directory} for temporary files ({error.strerror})"
        ) from error
    return SftpServer(grid, accounts, key, directory)
