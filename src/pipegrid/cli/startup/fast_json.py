"""Results in JSON that are so plain that ``json`` is not worth loading, which takes six milliseconds."""

from __future__ import annotations

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any


def plain_json(fields: dict[str, Any]) -> bytes | None:
    """
    Return an object as a line, as ``json`` would write it: numbers, and texts that need no escapes.

    None: there is something else in it.
    """
    parts = []
    for name, value in fields.items():
        if type(value) not in (int, str):
            return None
        text = f"{name}{value}"
        if not (text.isascii() and text.isprintable()) or '"' in text or "\\" in text:
            return None
        parts.append(f'"{name}": "{value}"' if type(value) is str else f'"{name}": {value}')
    return f"{{{', '.join(parts)}}}\n".encode("ascii")
