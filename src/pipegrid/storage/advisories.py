"""
What clients complain about, kept for the operator: a file for each, as Tahoe-LAFS's servers do.

At most 1000 are kept, of at most 32768 bytes each: they must not fill the disk.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime, timezone

from pipegrid.core import base32
from pipegrid.core.text import harmless
from pipegrid.disk import files as disk

MAX_ADVISORIES = 1000
MAX_REASON_BYTES = 32768


def keep(
    directory: str,
    now: float,
    storage_index: bytes,
    share_number: int,
    reason: str,
    mutable: bool,
) -> bool:
    """
    Write one complaint down, unless there are too many already; returns whether that was done.

    Args:
        directory: for all of them; made if it is missing.
        now: seconds since 1970.

    Raises:
        ServerRefused: the disk failed.
    """
    kind = "mutable" if mutable else "immutable"
    index = base32.encode(storage_index)
    when = datetime.fromtimestamp(now, timezone.utc)
    path = f"{directory}/{when:%Y-%m-%dT%H%M%S.%f}--{index}-{share_number}"
    try:
        os.makedirs(directory, exist_ok=True)
        if len(os.listdir(directory)) >= MAX_ADVISORIES:
            return False
        # It will be looked at in a terminal.
        safe = harmless(reason[:MAX_REASON_BYTES]).encode("utf-8", "replace")
        text = safe[:MAX_REASON_BYTES].decode("utf-8", "ignore")
        with suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            file.write(
                f"time: {when:%Y-%m-%dT%H:%M:%S}Z\nshare type: {kind}\n"
                f"storage index: {index}\nshare number: {share_number}\n\n{text}\n"
            )
    except OSError as error:
        raise disk.disk_error(error, f"keep an advisory in {directory!r}") from error
    return True
