"""
What the answers of one host have taught about it: facts in, advice out.

**Size of answers.** Where nobody can say how long an answer will be, the host's habit is the best guess:
the estimate jumps up to each longer answer at once, and comes down by a sixteenth with each shorter
one. So a host that mixes both kinds is treated as one of long answers, which is slower, not wrong.

**Pipelining.** Most servers take it, some do not: they close, or forget what they had read ahead, or
mix up answers. Such a host is spoken to one request at a time for a while, longer each time, up to
``serial_memory_s``. A single closed connection proves nothing (servers restart, and close what was idle), two
in a row without any success in between are enough; garbage or silence behind answers are enough at once.

**How many a connection.** Servers close a connection after so many answers: nginx after 1000 (100 before
1.19.10), Apache httpd after 100. What was written behind the last of them was written in vain: of 6,200 files
5,273 were asked for twice. So ``quota`` begins with the most usual number; a host that closes sooner is
taken at its word, one that goes on has none.

**How much may be owed.** ``response_budget_bytes`` is what every server bears. A host that says it is one
of those known to bear more, or that has answered many requests with others behind them and says that it
is not built on Twisted, gets a measured window. If that ends badly once, never again.
"""

from __future__ import annotations

from pipegrid.http11.exchange import Exchange
from pipegrid.http11.limits import Limits
from pipegrid.http11.loss import Loss

MIN_ASSUMED_BYTES = 256

FIRST_QUOTA = 1000.0
LEAST_QUOTA = 10
"""A server that closes sooner does so for reasons of the moment."""

PROOF = 10  # answers with others outstanding behind them: a server that does this can pipeline

BEAR_MORE = (
    b"nginx",
    b"openresty",
    b"apache",
    b"lighttpd",
    b"caddy",
    b"varnish",
    b"h2o",
    b"ats",
    b"litespeed",
)
"""
Products that stop reading, and reading ahead, while they cannot write: how ``Server`` begins, in lower case.
"""

BEAR_LESS = (b"twisted",)
"""Those that drop the connection when a request comes while they cannot write."""

FIRST_SERIAL_SHARE = 1 / 60
"""Of ``serial_memory_s``: how long a host is spoken to one request at a time when that happens first."""


class HostRecord:
    """
    The memory of one host.

    Attributes:
        assumed_response_bytes: what to expect of an answer nobody can predict.
        proven: the host speaks HTTP/1.1 and keeps connections open, so even a request that must not
            be repeated may be written behind others.
        bears_more: more may be owed than ``response_budget_bytes``.
        quota: how many requests a connection to it is good for, as far as is known.
        quota_is_told: it said so itself.

    Args:
        serial: it is spoken to one request at a time whatever it does.
    """

    def __init__(self, limits: Limits, serial: bool = False) -> None:
        self._limits = limits
        self.assumed_response_bytes = limits.assumed_response_bytes
        self.proven = False
        self.bears_more = False
        self.quota = FIRST_QUOTA
        self.quota_is_told = False
        self._strikes = 0
        self._behind = 0
        self._product: bytes | None = None
        self._burned = limits.max_response_budget_bytes <= limits.response_budget_bytes
        self._serial_until = float("inf") if serial else 0.0
        self._serial_s = limits.serial_memory_s * FIRST_SERIAL_SHARE

    def __repr__(self) -> str:
        return (
            f"<HostRecord {'proven' if self.proven else 'unproven'},"
            f" {self._strikes} strikes, serial until {self._serial_until:g},"
            f" answers of {self.assumed_response_bytes} bytes>"
        )

    def is_serial(self, now: float) -> bool:
        """Whether to speak to this host one request at a time."""
        return now < self._serial_until

    def answered(self, exchange: Exchange, now: float, others_behind: bool) -> None:
        """
        Learn from a complete answer.

        Args:
            others_behind: whether other requests stood behind this one.
        """
        size = exchange.received_bytes
        assumed = self.assumed_response_bytes
        if size >= assumed:
            self.assumed_response_bytes = size
        elif assumed > MIN_ASSUMED_BYTES:
            self.assumed_response_bytes = max(
                MIN_ASSUMED_BYTES, assumed - 1 - (assumed - size >> 4)
            )
        if not self.proven:
            head = exchange.response
            assert head is not None
            if head.version == (1, 0):
                self._serial_s = self._limits.serial_memory_s
                self._become_serial(now)
            elif head.keep_alive:
                self.proven = True
        if not (self.bears_more or self._burned):
            self._judge(exchange, others_behind)

    def outlasted(self, answered: int) -> None:
        """A connection has given so many answers and stays open: if that is its quota, it has none."""
        if answered >= self.quota:
            self.quota = float("inf")

    def _judge(self, exchange: Exchange, others_behind: bool) -> None:
        """See whether more may be owed."""
        product = self._product
        if product is None:
            head = exchange.response
            assert head is not None
            named = [value for name, value in head.headers if name == b"server"]
            product = self._product = named[0].lower() if named else b""
        self._behind += others_behind
        if not product or product.startswith(BEAR_LESS):
            self._burned = True
        elif self.proven:
            self.bears_more = product.startswith(BEAR_MORE) or self._behind >= PROOF

    def lost(self, loss: Loss, answered_behind: int, now: float) -> bool:
        """
        Learn from the end of a connection.

        Args:
            answered_behind: how many of its answers had others outstanding behind them.

        Returns:
            Whether pipelining was at fault, so that repeating a request alone may go well.
        """
        if loss.said_close and loss.answered >= LEAST_QUOTA:
            self.quota = loss.answered
            self.quota_is_told = True
        if self.bears_more and loss.in_flight > 1 and not loss.announced:
            self.bears_more, self._burned = False, True
        if answered_behind >= PROOF:
            self._strikes = 0
            if not loss.garbage:
                return False
        if loss.announced or loss.in_flight < 2 or self.is_serial(now):
            return False
        self._strikes += 2 if loss.garbage or loss.timed_out else 1
        if self._strikes < 2:
            return False
        self._become_serial(now)
        return True

    def _become_serial(self, now: float) -> None:
        self._strikes = 0
        self.proven = False
        self._serial_until = max(self._serial_until, now + self._serial_s)
        self._serial_s = min(2 * self._serial_s, self._limits.serial_memory_s)
