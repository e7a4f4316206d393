"""
Fuzz targets: functions that take any bytes and raise if what reads them does not keep its promises.

``python -m misc.fuzz TARGET`` looks for such bytes; ``tests/test_fuzz_corpus.py`` replays those that are
kept.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

CORPUS = Path(__file__).parent.parent.parent / "tests" / "fuzz_corpus"
"""One directory a target: seeds, and whatever once found something."""

MAX_INPUT_BYTES = 4096
MAX_CORPUS_FILES = 30

TARGETS = {
    "banana": "misc.fuzz.banana",
    "caps": "misc.fuzz.caps",
    "certificates": "misc.fuzz.certificates",
    "directories": "misc.fuzz.directories",
    "heads": "misc.fuzz.heads",
    "indexes": "misc.fuzz.indexes",
    "lists": "misc.fuzz.lists",
    "messages": "misc.fuzz.messages",
    "mutable": "misc.fuzz.mutable",
    "patches": "misc.fuzz.patches",
    "records": "misc.fuzz.records",
    "repomd": "misc.fuzz.repomd",
    "requests": "misc.fuzz.requests",
    "responses": "misc.fuzz.responses",
    "shares": "misc.fuzz.shares",
}
"""Each target's module, which has ``run(data)`` and ``seeds()``; not imported before it is needed."""


def load(target: str) -> Callable[[bytes], None]:
    """Return a target's function; it raises for bytes that break a promise."""
    run: Callable[[bytes], None] = import_module(TARGETS[target]).run
    return run


def seeds(target: str) -> dict[str, bytes]:
    """Return by name what a search of the target can start from."""
    made: dict[str, bytes] = import_module(TARGETS[target]).seeds()
    return made
