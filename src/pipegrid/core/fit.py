"""
Whether a cap fits the file that is stored: a digit that was copied wrongly is not a server's fault.

A cap ends in the UEB's hash, k, n and the size. The UEB that has this hash tells the same numbers; if it
tells others, the cap contradicts itself. If no share has a UEB of this hash, and servers agree on another
one, then it is the cap's hash that is wrong: that several servers' copies have been damaged alike is out
of the question. One that stands alone proves nothing, and as soon as any share has the right one those
that have not are damaged.

A wrong character in the key is another matter: it leads to other places, where nothing is.

Pure: told of records.
"""

from __future__ import annotations

from collections.abc import Hashable

from pipegrid.core import ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.hashes import UEB
from pipegrid.core.ueb import Ueb
from pipegrid.errors import CapMismatch

WITNESSES = 2
"""So many servers have to agree."""


class CapFit:
    """
    What the shares of a file tell of the cap.

    Attributes:
        fits: some share has the UEB that the cap names, and it tells the cap's numbers.
    """

    def __init__(self, cap: ChkCap | ChkVerifierCap) -> None:
        self._cap = cap
        self.fits = False
        self._contradiction: CapMismatch | None = None
        self._others: dict[bytes, set[Hashable]] = {}

    def told(self, server: Hashable, packed: bytes) -> None:
        """A share on this server has this UEB."""
        try:
            parsed = ueb.parse(packed)
        except ValueError:
            return
        if UEB.hash(packed) != self._cap.ueb_hash:
            if numbers(parsed) is not None:  # other bytes are no UEB of any file
                self._others.setdefault(packed, set()).add(server)
            return
        self._contradiction = contradiction(self._cap, parsed)
        self.fits = self._contradiction is None

    @property
    def mismatch(self) -> CapMismatch | None:
        """The error, if the cap does not fit what is stored, as far as servers were asked."""
        if self.fits or self._contradiction is not None:
            return self._contradiction
        packed, servers = max(
            self._others.items(), key=lambda item: len(item[1]), default=(b"", set[Hashable]())
        )
        if len(servers) < WITNESSES:
            return None
        stored = numbers(ueb.parse(packed))
        assert stored is not None
        return CapMismatch(
            f"this cap does not fit the file that is stored: {len(servers)} servers agree on a file of "
            f"{_described(*stored)} whose hash is not the cap's, which is for {_described(*_of(self._cap))}; "
            "a character of the cap is wrong, so copy it again"
        )


def contradiction(cap: ChkCap | ChkVerifierCap, parsed: Ueb) -> CapMismatch | None:
    """Return the error if the UEB that the cap names tells other numbers than the cap."""
    stored = numbers(parsed)
    if stored is None or stored == _of(cap):
        return None
    return CapMismatch(
        f"this cap does not fit the file that is stored: it is for {_described(*_of(cap))}, and what is "
        f"stored is {_described(*stored)}; a digit of the cap is wrong, so copy it again"
    )


def numbers(parsed: Ueb) -> tuple[int, int, int] | None:
    """Return k, n and the size as a UEB tells them; None if it does not."""
    told = [parsed.fields.get(key, b"") for key in (b"needed_shares", b"total_shares", b"size")]
    if not all(each.isdigit() and len(each) <= 20 for each in told):
        return None
    k, n, size = map(int, told)
    return k, n, size


def _of(cap: ChkCap | ChkVerifierCap) -> tuple[int, int, int]:
    return cap.required_shares, cap.total_shares, cap.size


def _described(k: int, n: int, size: int) -> str:
    return f"{size} bytes in {k} of {n} shares"
