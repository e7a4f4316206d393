"""
Parses the children in the body of a request: JSON with names, caps and metadata becomes edits of a directory.

A cap of unknown kind counts as a write cap unless it has the prefix ``ro.`` or ``imm.``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipegrid.core.caps import (
    Cap,
    ChkCap,
    DirectoryCap,
    LitCap,
    MutableCap,
    UnknownCap,
    parse_cap,
)
from pipegrid.core.mutable.directory_content_edits import Link
from pipegrid.core.packed_directory import PackedChild
from pipegrid.errors import CapError
from pipegrid.gateway.http_response import WebError
from pipegrid.gateway.web_api.web_arguments import Replace

READ_ONLY, IMMUTABLE = "ro.", "imm."


def parse_children(data: bytes) -> dict[str, dict[str, Any]]:
    """
    Return the properties of each child, by name; {} for an empty body.

    Raises:
        WebError: the body is not JSON that describes children.
    """
    if not data.strip():
        return {}
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise WebError(400, "the body is not JSON; it names children, as in a listing") from None
    if not isinstance(found, dict):
        raise WebError(400, "the body is not a JSON object that names children")
    return {name: _properties(name, given) for name, given in found.items()}


def _properties(name: str, given: Any) -> dict[str, Any]:
    if not (isinstance(given, list) and len(given) == 2 and isinstance(given[1], dict)):
        raise WebError(
            400, f"the child {name[:50]!r} is not a list of its type and an object with its caps"
        )
    properties: dict[str, Any] = given[1]
    for key in ("rw_uri", "ro_uri"):
        if not isinstance(properties.get(key), (str, type(None))):
            raise WebError(400, f"the {key} of the child {name[:50]!r} is not text")
    if not isinstance(properties.get("metadata", {}), dict):
        raise WebError(400, f"the metadata of the child {name[:50]!r} are not a JSON object")
    return properties


def links_of(children: dict[str, dict[str, Any]], replace: Replace) -> list[Link]:
    """
    Return the edits that link children into a mutable directory.

    Raises:
        WebError: a cap cannot be linked.
    """
    return [link_of(name, given, replace) for name, given in children.items()]


def link_of(name: str, given: Mapping[str, Any], replace: Replace) -> Link:
    """
    Return the edit that links one child.

    Args:
        given: the properties of the child, as ``parse_children`` returns them.

    Raises:
        WebError: the caps of the child cannot be linked.
    """
    cap, read_cap = sorted_caps(given.get("rw_uri") or "", given.get("ro_uri") or "")
    return Link(name, cap, read_cap, given.get("metadata"), replace != "false", replace == "true")


def sorted_caps(rw: str, ro: str) -> tuple[Cap, Cap | None]:
    """
    Return the cap of a child of a mutable directory; for a write cap of unknown kind, also the read cap.

    Raises:
        WebError: the caps cannot be linked.
    """
    if not rw and not ro:
        return UnknownCap(""), None
    if rw:
        cap = _parsed(rw)
        if not isinstance(cap, UnknownCap):
            return _linkable(cap), None
        if not rw.startswith((READ_ONLY, IMMUTABLE)):
            if not ro or ro.startswith(IMMUTABLE):
                raise WebError(
                    400,
                    "MustNotBeUnknownRWError: a capability of an unknown kind cannot be linked as a write "
                    "cap without its read cap; give that, or put ro. or imm. before it if it is one",
                )
            read = _parsed(ro)
            text = ro if ro.startswith(READ_ONLY) else READ_ONLY + ro
            return cap, UnknownCap(text) if isinstance(read, UnknownCap) else read
        ro = ro or rw
    cap = _parsed(ro)
    if not isinstance(cap, UnknownCap):
        return _linkable(cap), None
    bare = ro.removeprefix(READ_ONLY).removeprefix(IMMUTABLE)
    if not isinstance(_parsed(bare), UnknownCap):
        wrong = "MustBeReadonlyError" if ro.startswith(READ_ONLY) else "MustBeDeepImmutableError"
        raise WebError(400, f"{wrong}: a capability can do more than the prefix before it says")
    return UnknownCap(ro if ro.startswith((READ_ONLY, IMMUTABLE)) else READ_ONLY + ro), None


def packed_children(children: dict[str, dict[str, Any]]) -> list[PackedChild]:
    """
    Return the entries of an immutable directory.

    Raises:
        WebError: a child is mutable, or its cap is an unknown write cap.
    """
    return [
        PackedChild(name, immutable_child(given), given.get("metadata") or {})
        for name, given in children.items()
    ]


def immutable_child(given: dict[str, Any]) -> Cap:
    """
    Return the cap of a child of an immutable directory.

    Raises:
        WebError: the child is mutable, or its cap is an unknown write cap.
    """
    rw, ro = given.get("rw_uri") or "", given.get("ro_uri") or ""
    text = rw or ro
    if not text:
        return UnknownCap(
            ""
        )  # only name and metadata, with which magic-folder records a deleted file
    cap = _parsed(text)
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, (ChkCap, LitCap)):
        return cap
    bare = text.removeprefix(READ_ONLY).removeprefix(IMMUTABLE)
    is_unknown = isinstance(cap, UnknownCap) and isinstance(_parsed(bare), UnknownCap)
    if is_unknown and bare and (not rw or rw != bare):
        return UnknownCap(IMMUTABLE + bare)
    if is_unknown and bare:
        raise WebError(
            400,
            "MustNotBeUnknownRWError: a capability of an unknown kind cannot be a write cap in an immutable "
            "directory",
        )
    raise WebError(
        400, "MustBeDeepImmutableError: an immutable directory has immutable children only"
    )


def _parsed(text: str) -> Cap:
    try:
        return parse_cap(text)
    except CapError as error:
        raise WebError(400, str(error)) from None


def _linkable(cap: Cap) -> Cap:
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, (ChkCap, LitCap)) or (
        isinstance(file, MutableCap) and file.access != "verify"
    ):
        return cap
    raise WebError(400, "a verifier cap does not read anything; link a capability that does")
