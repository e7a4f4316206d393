"""
The recorded vectors that tests compare with.

Who computed them, and how: ``vectors/README.md`` beside them.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent / "vectors"


@cache
def load(name: str) -> Any:
    """Return the parsed file ``vectors/NAME.json``; treat it as read-only."""
    return json.loads((_HERE / f"{name}.json").read_text("utf-8"))


def plaintext(spec: dict[str, Any]) -> bytes:
    """Return the plaintext that a vector's ``plaintext`` field describes."""
    if "hex" in spec:
        return bytes.fromhex(spec["hex"])
    return hashlib.shake_128(spec["seed"].encode("ascii")).digest(spec["length"])
