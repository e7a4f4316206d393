"""
What callers of the library may pass: a wrong argument is an error of theirs, told in a sentence at once.

Without, it would fail somewhere inside, as an assertion or with the name of something that nobody called.
"""

from __future__ import annotations

from typing import Any

from pipegrid.errors import UsageError


def check_whole(value: Any, name: str, least: int | None = None, most: int | None = None) -> int:
    """
    Return a whole number, within bounds if there are any.

    Raises:
        UsageError: it is something else; truth values are.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and (least is None or value >= least) and (most is None or value <= most):
        number: int = value
        return number
    bounds = "" if least is None else f" of at least {least}"
    if most is not None:
        bounds = f" of at most {most}" if least is None else f" from {least} to {most}"
    raise UsageError(f"{name} is a whole number{bounds}, not {shown(value)}")


def check_seconds(value: Any, name: str) -> None:
    """Raise UsageError unless it is a time that can pass."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise UsageError(f"{name} is a number of seconds above 0, not {shown(value)}")


def check_callable(value: Any, name: str) -> None:
    """Raise UsageError unless it can be called, or is None."""
    if value is not None and not callable(value):
        raise UsageError(f"{name} is a function to be called, not {shown(value)}")


def check_kind(
    value: Any, kinds: type | tuple[type, ...], name: str, kind: str, secret: bool = False
) -> None:
    """
    Raise UsageError unless it is one of these kinds, which people call ``kind``.

    Args:
        secret: what was given instead may be one, and is not shown.
    """
    if not isinstance(value, kinds):
        raise UsageError(f"{name} is {kind}, not {shown(value, secret)}")


def check_has(value: Any, attributes: tuple[str, ...], name: str, kind: str) -> None:
    """Raise UsageError unless it has all these attributes, as whatever people call ``kind`` has."""
    if not all(hasattr(value, each) for each in attributes):
        raise UsageError(f"{name} is {kind}, not {shown(value)}")


def shown(value: object, secret: bool = False) -> str:
    """
    Return how a value is told in a sentence: what it is, and a short one itself.

    Args:
        secret: it may be one, as text or bytes, or have one in it, and is not shown then.
    """
    if value is None:
        return "None"
    kind = type(value).__name__
    if secret and not isinstance(value, (int, float)):
        return f"a {kind}"
    text = repr(value)
    return f"{text} ({kind})" if len(text) <= 40 else f"a {kind}"
