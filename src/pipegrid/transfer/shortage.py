"""
Saying that too few shares were found, and why, once for each reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipegrid.core.text import counted
from pipegrid.errors import NotEnoughSharesError
from pipegrid.transfer.reasons import said_once


def too_few_shares(
    verb: str,
    found: int,
    needed: int,
    servers: int,
    reasons: Mapping[str, str],
    was_any: bool,
    absent: int = 0,
    absent_shares: int | None = None,
) -> NotEnoughSharesError:
    """
    Return the error.

    Args:
        verb: what cannot be done to the file.
        servers: how many there are.
        reasons: server to the sentence that says why it was of no use.
        was_any: some server has had a share, good or not, or could not be asked.
        absent: servers that were out of reach.
        absent_shares: see ``NotEnoughSharesError``.
    """
    because = said_once(reasons)
    if not found and not reasons and not was_any:
        text = (
            f"no share of the file is on any of {counted(servers, 'server')}; check that the cap was copied "
            "right, and that this is the grid that it is for"
        )
    else:
        are = "is" if needed == 1 else "are"
        text = (
            f"cannot {verb} the file: found {counted(found, 'good share')} on {counted(servers, 'server')}, "
            f"but {needed} {are} needed{f' ({because})' if because else ''}; "
            "try again when more servers work"
        )
    return NotEnoughSharesError(text, found, needed, absent, absent_shares)
