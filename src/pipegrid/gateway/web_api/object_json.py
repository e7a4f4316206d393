"""
JSON of an object for ``t=json``: a list of two items, the kind and the properties.

The properties have the order that Tahoe-LAFS uses; properties that are not known are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipegrid.core.caps import (
    Cap,
    ChkCap,
    ChkVerifierCap,
    DirectoryCap,
    LitCap,
    MutableCap,
    UnknownCap,
    writes,
)
from pipegrid.gateway.web_api.path_lookup import is_verifier
from pipegrid.tree.directory import Child

Json = dict[str, Any]


def kind_word(cap: Cap | None) -> str:
    """Return the kind: ``filenode``, ``dirnode`` or ``unknown``."""
    if cap is None or isinstance(cap, (UnknownCap, ChkVerifierCap)) or is_verifier(cap):
        return "unknown"
    return "dirnode" if isinstance(cap, DirectoryCap) else "filenode"


def read_cap_text(cap: Cap) -> str:
    """Return the read cap of an object as text; a cap of unknown kind is returned as it is."""
    return str(cap) if isinstance(cap, UnknownCap) else str(cap.readonly())


def file_json(cap: ChkCap | LitCap | MutableCap, size: int | None = None) -> Json:
    """
    Return the properties of a file.

    Args:
        size: size of a mutable file in bytes; None: not known.
    """
    if not isinstance(cap, MutableCap):
        found: Json = {"mutable": False, "format": "CHK", "size": cap.size}
    else:
        found = {"mutable": True, "format": "MDMF" if cap.kind == "MDMF" else "SDMF"}
        if size is not None:
            found["size"] = size
    return {**found, **_derived_caps(cap)}


def directory_json(cap: DirectoryCap, children: Mapping[str, Child]) -> Json:
    """Return the properties of a directory, which include its children."""
    found: Json = {"children": {name: child_json(child) for name, child in children.items()}}
    return {**found, **_derived_caps(cap), "mutable": isinstance(cap.file, MutableCap)}


def child_json(child: Child) -> list[Any]:
    """Return kind and properties of a child, for a listing."""
    cap = known_cap(child)
    kind = kind_word(cap)
    metadata = {"metadata": child.metadata}
    if kind == "unknown":
        return [kind, {**metadata, **_unknown_caps(child)}]
    if isinstance(cap, DirectoryCap):
        mutable = isinstance(cap.file, MutableCap)
        return [kind, {"mutable": mutable, **metadata, **_derived_caps(cap, True)}]
    assert isinstance(cap, (ChkCap, LitCap, MutableCap))
    return [kind, {**file_json(cap), **metadata}]


def known_cap(child: Child) -> Cap | None:
    """Return the write cap of a child, or else its read cap, if of a known kind; None if neither is."""
    write, read = child.write_cap, child.read_cap
    if not (write is None or isinstance(write, UnknownCap)) and read in (None, write.readonly()):
        return write
    return None if isinstance(read, UnknownCap) else read


def unknown_json(child: Child | None, cap: Cap | None) -> Json:
    """
    Return the properties of an object of unknown kind, from its entry or, if there is none, from its cap.
    """
    if child is None:
        text = "" if cap is None else str(cap)
        if text.startswith("ro."):
            return {"ro_uri": text}
        return {"ro_uri": text, "mutable": False} if text.startswith("imm.") else {}
    found = _unknown_caps(child)
    if "rw_uri" in found:
        found["mutable"] = True
    elif found.get("ro_uri", "").startswith("imm."):
        found["mutable"] = False
    return found


def _unknown_caps(child: Child) -> Json:
    found: Json = {}
    if child.read_cap is not None:
        found["ro_uri"] = str(child.read_cap)
    if child.write_cap is not None:
        found["rw_uri"] = str(child.write_cap)
    return found


def _derived_caps(
    cap: ChkCap | LitCap | MutableCap | DirectoryCap, write_first: bool = False
) -> Json:
    found: Json = {"rw_uri": str(cap)} if write_first and writes(cap) else {}
    found["ro_uri"] = str(cap.readonly())
    if writes(cap):
        found["rw_uri"] = str(cap)
    verifier = cap.verifier()
    if verifier is not None:
        found["verify_uri"] = str(verifier)
    return found
