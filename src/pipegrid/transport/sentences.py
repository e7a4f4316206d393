"""
What is said of a server, whichever protocol it speaks: sentences that stand in the errors of both.

Each names the server as a person calls it.
"""

from __future__ import annotations

from pipegrid.errors import NoSuchShare, ServerProtocolError, ServerRefused


def nonsense(server: str, question: str, what: str) -> ServerProtocolError:
    """It answered what no storage server answers."""
    return ServerProtocolError(
        f"{server} answered {question} with {what}; is it a storage server?", server, True
    )


def no_share(server: str, share_number: int) -> NoSuchShare:
    """It has no such complete share."""
    return NoSuchShare(f"{server} has no share {share_number}", server)


def nothing_to_lease(server: str, first: str = "upload") -> NoSuchShare:
    """It has no share at all; ``first`` says what must be done before."""
    return NoSuchShare(f"{server} has no share of this file; {first} it first", server)


def no_upload(server: str, share_number: int) -> NoSuchShare:
    """It has no such unfinished upload."""
    return NoSuchShare(
        f"{server} knows no unfinished upload of share {share_number}; allocate it again", server
    )


def wrong_swissnum(server: str, address: str) -> ServerRefused:
    """The secret in its address, a NURL or a fURL, is not its own."""
    return ServerRefused(
        f"{server} does not know the secret in its address; copy its {address} anew", server
    )


def excerpt(text: str, characters: int) -> str:
    """The beginning of a text from a stranger, fit to be shown: one line, no control characters."""
    text = "".join(c if c.isprintable() else " " for c in text[: 4 * characters])
    text = " ".join(text.split())
    return text if len(text) <= characters else text[:characters] + "…"
