"""
Checks of the arguments that callers of the library pass.

Each check reports a wrong argument at once, in one sentence; otherwise the call would fail later, in code
that the caller does not know.
"""

from __future__ import annotations

from typing import Any

from pipegrid.errors import UsageError


def check_whole(value: Any, name: str, least: int | None = None) -> int:
    """
    Return ``value`` if it is a whole number of at least ``least``.

    Raises:
        UsageError: ``value`` is not such a number, or is a boolean.
    """
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        return value
    bounds = "" if least is None else f" of at least {least}"
    raise UsageError(f"{name} is a whole number{bounds}, not {shown(value)}")


def check_seconds(value: Any, name: str) -> None:
    """Raise UsageError unless ``value`` is a positive number of seconds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise UsageError(f"{name} is a number of seconds above 0, not {shown(value)}")


def check_callable(value: Any, name: str) -> None:
    """Raise UsageError unless ``value`` can be called or is None."""
    if value is not None and not callable(value):
        raise UsageError(f"{name} is a function to be called, not {shown(value)}")


def check_kind(
    value: Any, kinds: type | tuple[type, ...], name: str, kind: str, secret: bool = False
) -> None:
    """
    Raise UsageError unless ``value`` is an instance of ``kinds``.

    Args:
        kind: what the error calls an instance of ``kinds``.
        secret: whether the error must not show the value, since it may be a secret.
    """
    if not isinstance(value, kinds):
        raise UsageError(f"{name} is {kind}, not {shown(value, secret)}")


def check_has(value: Any, attributes: tuple[str, ...], name: str, kind: str) -> None:
    """Raise UsageError unless ``value`` has all these attributes; the error calls such objects ``kind``."""
    if not all(hasattr(value, each) for each in attributes):
        raise UsageError(f"{name} is {kind}, not {shown(value)}")


def shown(value: object, secret: bool = False) -> str:
    """
    Return how an error shows a value: its type, and the value itself if it is short.

    Args:
        secret: whether to show only the type of text and bytes, since they may contain a secret.
    """
    if value is None:
        return "None"
    kind = type(value).__name__
    if secret and not isinstance(value, (int, float)):
        return f"a {kind}"
    text = repr(value)
    return f"{text} ({kind})" if len(text) <= 40 else f"a {kind}"
