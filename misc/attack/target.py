"""What attack programs have in common: their options, sockets, and when to end."""

from __future__ import annotations

import argparse
import contextlib
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from misc.ending import end_on_sigterm
from misc.speedtest.server import Server
from pipegrid.wire import server_address

CONNECT_S = 5.0


@attrs.define
class Target:
    """
    The server that is attacked.

    Attributes:
        host, port: where it listens.
        nurl, furl: its addresses, secrets included, for those who have them.
        directory: the node's, where its storage is.
        ends_s: when to stop, on ``time.monotonic``.
    """

    host: str
    port: int
    nurl: str
    furl: str
    directory: Path
    ends_s: float

    @property
    def left_s(self) -> float:
        """How long the attack may go on."""
        return self.ends_s - time.monotonic()

    @property
    def requests(self) -> Server:
        """What makes requests with the secret, for those who have it."""
        return Server("target", self.nurl, 0)

    def connect(self, source: str = "") -> socket.socket:
        """
        Return a TCP connection.

        Args:
            source: from which address; all of 127.0.0.0/8 are this machine.
        """
        return socket.create_connection(
            (self.host, self.port), CONNECT_S, (source, 0) if source else None
        )

    def connect_tls(self, source: str = "") -> ssl.SSLSocket:
        """Return a connection with TLS; anybody can make one."""
        raw = self.connect(source)
        try:
            return context().wrap_socket(raw)
        except BaseException:
            raw.close()
            raise


def from_command_line(description: str | None) -> Target:
    """Parse the options that each program has, and prepare for many sockets and an early end."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--furl", required=True)
    parser.add_argument("--nurl", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    end_on_sigterm(5)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    return make_target(options.nurl, options.furl, options.directory, options.seconds)


def make_target(nurl_text: str, furl: str, directory: Path, seconds: float) -> Target:
    """Return a target that is to be attacked for so long, from now on."""
    address = server_address.parse_nurl(nurl_text)
    ends_s = time.monotonic() + seconds
    return Target(address.host, address.port, nurl_text, furl, directory, ends_s)


def again_and_again(target: Target, pause_s: float = 0.0) -> Iterator[int]:
    """Count up until the time is over."""
    turn = 0
    while target.left_s > 0:
        yield turn
        turn += 1
        time.sleep(min(pause_s, max(0.0, target.left_s)))


class Crowd:
    """
    So many open connections, with new ones for those that were cut.

    Args:
        make: returns a new one, with its first words said.
        count: how many.
    """

    def __init__(self, make: Callable[[int], socket.socket], count: int) -> None:
        self._make = make
        self._count = count
        self._made = 0
        self._open: dict[socket.socket, float] = {}

    def fill(self) -> None:
        """Make one more, if one is missing."""
        if len(self._open) < self._count:
            with refused_or_cut():
                connection = self._make(self._made)
                self._made += 1
                self._open[connection] = time.monotonic()

    def say(self, data: bytes, every_s: float) -> None:
        """Have those speak that have been silent for so long; those that were cut are forgotten."""
        now_s = time.monotonic()
        due = [one for one, spoke_s in self._open.items() if now_s - spoke_s >= every_s]
        for each in due:
            try:
                each.sendall(data)
            except OSError:  # noqa: PERF203
                del self._open[each]
                each.close()
            else:
                self._open[each] = now_s

    def forget_cut(self) -> None:
        """Look which ones were cut, without saying anything."""
        waiting = select.poll()
        by_fd = {each.fileno(): each for each in self._open}
        for fd in by_fd:
            waiting.register(fd, select.POLLRDHUP)
        for fd, _ in waiting.poll(0):
            del self._open[by_fd[fd]]
            by_fd[fd].close()


@contextlib.contextmanager
def refused_or_cut() -> Iterator[None]:
    """An attack goes on when the server refuses or cuts a connection, which is what it should do."""
    with contextlib.suppress(OSError):  # ssl.SSLError and TimeoutError among them
        yield


def context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
