"""
How long a server may be silent to one of those who wait for it, while it is busy with others.

On a slow line what one transfer waits for is behind what others do, for longer than anybody may be silent:
so what a server does for others is a sign of life to all. But one that answers everything except a single
request must not keep whoever made that waiting for ever: its signs to others count for a while only.
"""

from __future__ import annotations

MOST_TIMES = 10
"""So many times as long as a server may be silent altogether it may be silent to one that waits."""


def last_sign_s(own_s: float, server_s: float, silence_s: float) -> float:
    """
    Return when a server gave its last sign of life that counts for one who waits, in seconds of some clock.

    Args:
        own_s: when it gave one to those who wait, or when they began to.
        server_s: when it gave one to whomever.
        silence_s: how long it may give none.
    """
    return max(own_s, min(server_s, own_s + (MOST_TIMES - 1) * silence_s))
