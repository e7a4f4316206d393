"""
Choose what the repository keeps of a corpus: few small inputs that together go nearly everywhere.

An input's worth is the lines and jumps between lines of the package that no input chosen before takes. The
choice depends on the inputs alone. What is kept already comes first, since some of it once found a fault;
remove files by hand to have them chosen anew.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from misc import fuzz
from pipegrid import errors

_PACKAGE = str(Path(errors.__file__).parent)
_MAX_CANDIDATES = 3000
_CHOSEN_FILES = fuzz.MAX_CORPUS_FILES * 4 // 5
"""Up to so many are chosen; the rest is room for what finds faults."""

Jump = tuple[str, int, int]


def keep(target: str, corpus: Path) -> str:
    """Add to what is kept for a target until nothing is gained, or there is enough; say what was done."""
    kept = fuzz.CORPUS / target
    kept.mkdir(parents=True, exist_ok=True)
    run = fuzz.load(target)
    seen: set[Jump] = set()
    for path in sorted(kept.iterdir()):
        seen |= jumps(run, path.read_bytes())
    before = len(list(kept.iterdir()))
    room = _CHOSEN_FILES - before
    candidates = {
        path.name: data
        for path in sorted(corpus.iterdir(), key=lambda path: (path.stat().st_size, path.name))
        if len(data := path.read_bytes()) <= fuzz.MAX_INPUT_BYTES
    }
    worth = {
        name: jumps(run, candidates[name]) - seen for name in list(candidates)[:_MAX_CANDIDATES]
    }
    added = 0
    while added < room and worth:
        # The first is the smallest of those that are equally good.
        best = max(worth, key=lambda name: len(worth[name]))
        gain = worth.pop(best)
        if not gain:
            break
        data = candidates[best]
        name = best if best.startswith("seed-") else hashlib.sha256(data).hexdigest()[:12]
        (kept / name).write_bytes(data)
        added += 1
        worth = {name: rest for name, jumps in worth.items() if (rest := jumps - gain)}
    return f"{target}: {added} added to {before} of {len(candidates)} candidates"


def jumps(run: Callable[[bytes], None], data: bytes) -> set[Jump]:
    """Return where in the package an input leads, as jumps from line to line."""
    found: set[Jump] = set()

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            return None
        last = 0

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            found.add((file, last, frame.f_lineno))
            last = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        run(data)
    finally:
        sys.settrace(None)
    return found
