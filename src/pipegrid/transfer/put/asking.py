"""
One put and its answers: what it asks before it sends, and which last bytes wait until servers have said what
they have. When that is worth it, and how long it may take, ``elsewhere`` decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put.allocations import Allocations
from pipegrid.transfer.put.elsewhere import Elsewhere, LastBytes
from pipegrid.transfer.put.plan import UploadPlan
from pipegrid.transfer.put.shareset import ShareSet


class Asking:
    """
    What one put knows of where its shares are already.

    Args:
        elsewhere: what puts of this client have found.
        shares: those of the file.
        began_s: when the put began.
        grace_s: how long a server that is much slower than most is waited for; see ``LastBytes``.

    Attributes:
        first: nothing is sent before servers have answered, or have taken too long.
    """

    def __init__(
        self,
        elsewhere: Elsewhere,
        plan: UploadPlan[Peer],
        allocations: Allocations,
        shares: ShareSet,
        began_s: float,
        grace_s: float,
    ) -> None:
        self.first = elsewhere.asks_first(shares.share_bytes)
        self._elsewhere = elsewhere
        self._plan = plan
        self._allocations = allocations
        self._shares = shares
        self._guess = plan.first()
        self._wait = LastBytes(len(set(self._guess.values())), began_s, grace_s, elsewhere.asks)

    def ask(self) -> None:
        """Ask servers that are sent nothing yet, or no share at all, where that is worth it."""
        if not self._elsewhere.asks:
            return
        # Others place n shares among twice as many servers, or did so on a grid that was smaller.
        total = self._plan.total_shares
        for peer in self._plan.ring[0 if self.first else total : 2 * total]:
            self._allocations.ask(peer, frozenset(), self._shares.secrets_for(peer))

    def answered(self, now_s: float, servers: int) -> None:
        """So many more servers have answered, or have failed."""
        self._wait.answered(now_s, servers)

    def left_s(self, now_s: float) -> float:
        """Return how much longer answers are waited for; 0 or less: no longer."""
        return self._wait.left_s(now_s) if self._allocations.waiting else 0.0

    def may_hold_back(self, now_s: float) -> bool:
        """Whether some last byte may have to wait now: for a small file one look is enough."""
        return self._elsewhere.holds_back(self._shares.share_bytes, True) and self.left_s(now_s) > 0

    def holds_back(self, exceeds_window: bool) -> bool:
        """Whether the last byte of a share has to wait then; see ``Elsewhere.holds_back``."""
        return self._elsewhere.holds_back(self._shares.share_bytes, exceeds_window)

    def ended(self, found: Mapping[int, Collection[Peer]]) -> None:
        """The put has ended well, and has found these shares; it teaches whether all were as guessed."""
        self._elsewhere.ended(any(self._guess[n] not in peers for n, peers in found.items()))
