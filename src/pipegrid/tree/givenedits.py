"""Edits of directories as callers give them: what is wrong with one is told before anything begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import attrs

from pipegrid.arguments import check_kind
from pipegrid.core.caps import as_cap
from pipegrid.core.mutable.edits import Edit, Link, Rename, name_bytes
from pipegrid.core.names import composed
from pipegrid.errors import UsageError


def checked_edits(edits: Sequence[Edit]) -> list[Edit]:
    """
    Return edits of a caller's, who may change the list meanwhile; caps that were given as text are parsed.

    Raises:
        CapError, UsageError: one is none, or of a child that cannot be linked so.
    """
    check_kind(edits, Iterable, "what is to be changed", "a list of edits")
    return [_checked(edit) for edit in edits]


def _checked(edit: Edit) -> Edit:
    check_kind(edit, get_args(Edit), "an edit", "a Link, an Unlink or a Rename", secret=True)
    if isinstance(edit, Link):
        check_link(edit.name, edit.metadata)
        read_cap = None if edit.read_cap is None else as_cap(edit.read_cap)
        return attrs.evolve(edit, cap=as_cap(edit.cap), read_cap=read_cap)
    if isinstance(edit, Rename):
        check_kind(edit.old, str, "the name of a child", "text")
        check_name(edit.new)
    else:
        check_kind(edit.name, str, "the name of a child", "text")
    return edit


def check_link(name: str, metadata: dict[str, Any] | None) -> None:
    """
    Raises:
        UsageError: no child can be linked under this name, or with these metadata.
    """
    check_name(name)
    check_kind(metadata, (dict, type(None)), "the metadata of a child", "a dict")


def check_name(name: str) -> None:
    """
    Raises:
        UsageError: no child can be linked under this name.
    """
    check_kind(name, str, "the name of a child", "text")
    if not name:
        raise UsageError(
            "the name of a child has a character at least; no path leads to an empty one"
        )
    name_bytes(composed(name))
