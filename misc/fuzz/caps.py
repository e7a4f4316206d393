"""Any text is a cap, an unknown cap, or refused with CapError; what is known has one spelling."""

from __future__ import annotations

from contextlib import suppress

from pipegrid.core import base32
from pipegrid.core.caps import UnknownCap, checkable, parse_cap, readable
from pipegrid.errors import CapError

_KEY = base32.encode(bytes(range(16)))
_HASH = base32.encode(bytes(range(32)))


def run(data: bytes) -> None:
    """Parse the text as a command line or a directory would give it."""
    text = data.decode("utf-8", "surrogateescape")
    for given in (readable, checkable):
        with suppress(CapError):
            given(text)
    try:
        cap = parse_cap(text)
    except CapError as error:
        assert str(error), "a refusal that says nothing"
        return
    assert parse_cap(str(cap)) == cap, "a cap is read back as another"
    assert repr(cap)
    if isinstance(cap, UnknownCap):
        assert str(cap) == text, "an unknown cap is not kept as it was given"
        return
    weak = cap.readonly()
    assert weak.readonly() == weak
    assert parse_cap(str(weak)) == weak
    verifier = cap.verifier()
    index = cap.storage_index
    assert (verifier is None) == (index is None)
    if verifier is not None:
        assert index is not None
        assert len(index) == 16
        assert verifier.storage_index == index
        assert weak.verifier() == verifier
        assert parse_cap(str(verifier)) == verifier


def seeds() -> dict[str, bytes]:
    """Return one cap of each kind."""
    made = {"literal": "URI:LIT:ifsgc", "directory-literal": "URI:DIR2-LIT:ifsgc"}
    for kind in ("CHK", "CHK-Verifier", "DIR2-CHK", "DIR2-CHK-Verifier"):
        made[kind.lower()] = f"URI:{kind}:{_KEY}:{_HASH}:3:10:1234"
    for kind in ("SSK", "MDMF-RO", "DIR2-Verifier", "DIR2-MDMF"):
        made[kind.lower()] = f"URI:{kind}:{_KEY}:{_HASH}"
    made["promise"] = f"ro.URI:DIR2-RO:{_KEY}:{_HASH}"
    made["broken-promise"] = f"imm.URI:SSK:{_KEY}:{_HASH}"
    made["hints"] = f"URI:MDMF:{_KEY}:{_HASH}:3:131073"
    made["damaged"] = f"URI:CHK:{_KEY}:{_HASH[:-1]}b:3:10:1234"
    return {name: text.encode("ascii") for name, text in made.items()}
