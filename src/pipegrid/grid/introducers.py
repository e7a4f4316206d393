"""
Introducers that a client's directory names: ``private/introducers.yaml``, in Tahoe-LAFS's own format.

    introducers:
      my grid:                  # any name of one's own
        furl: pb://...

A ``tahoe.cfg`` of old has one in ``[client] introducer.furl`` instead. An entry that cannot be used is
skipped, and a warning says which and why.

Source: the format reference, storage protocols, section 4.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from pipegrid.errors import UsageError
from pipegrid.grid.homes import INTRODUCERS_NAME
from pipegrid.grid.servers import member_of, read_bounded
from pipegrid.grid.spelling import check_top_level
from pipegrid.grid.yamlfile import parse_yaml
from pipegrid.wire import furl
from pipegrid.wire.announcements import printable
from pipegrid.wire.furl import Furl

MAX_INTRODUCERS = 32


@attrs.frozen
class IntroducerAddress:
    """An introducer, and what its user calls it."""

    name: str
    furl: Furl


@attrs.frozen
class Introducers:
    """
    Attributes:
        addresses: in the order of the file.
        warnings: a sentence for each entry that was skipped.
    """

    addresses: tuple[IntroducerAddress, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Return the text of a file that names them; JSON is YAML."""
        entries = {each.name: {"furl": str(each.furl)} for each in self.addresses}
        return json.dumps({"introducers": entries}, indent=2) + "\n"


def load_introducers(directory: Path, old_furl: str | None = None) -> Introducers:
    """
    Return the introducers that a directory names; none if there is no such file.

    Args:
        old_furl: of a configuration of old; it is called ``default``, unless the file has one.

    Raises:
        UsageError: the file cannot be read, or is not what it should be as a whole.
    """
    path = directory / INTRODUCERS_NAME
    data = read_bounded(path)
    found = Introducers() if data is None else parse_introducers(data, str(path))
    if old_furl is None or any(each.name == "default" for each in found.addresses):
        return found
    old = _entries({"default": {"furl": old_furl}}, "[client] introducer.furl")
    return Introducers(found.addresses + old.addresses, found.warnings + old.warnings)


def parse_introducers(data: bytes, name: str) -> Introducers:
    """Return what the bytes of an ``introducers.yaml`` say; ``name`` is the file's, for errors."""
    document = parse_yaml(data, name)
    check_top_level(document, "introducers", data, name)
    introducers = {} if document is None else member_of(document, "introducers", {})
    if introducers is None and isinstance(document, dict):
        introducers = {}
    if not isinstance(introducers, dict):
        raise UsageError(f"{name} has no map under 'introducers'; correct it by hand")
    return _entries(introducers, name)


def _entries(introducers: Mapping[Any, Any], name: str) -> Introducers:
    addresses, warnings = [], []
    for number, (petname, entry) in enumerate(introducers.items()):
        shown = printable(str(petname))
        try:
            if number >= MAX_INTRODUCERS:
                raise UsageError(f"more than {MAX_INTRODUCERS} are not listened to")
            text = member_of(entry, "furl", None)
            if not isinstance(text, str):
                raise UsageError("it has no text under 'furl'")
            address = furl.parse(text.strip())
            if not address.leads_to_tcp:
                raise UsageError("its fURL leads to no TCP address, and PipeGrid uses no others")
            addresses.append(IntroducerAddress(shown, address))
        except UsageError as error:
            warnings.append(f"{name}: introducer {shown!r} is skipped: {error}")
        others = [key for key in entry if key != "furl"] if isinstance(entry, dict) else []
        warnings += [
            f"{name}: introducer {shown!r}: {printable(str(key))!r} is not read"
            for key in others[:8]
        ]
    return Introducers(tuple(addresses), tuple(warnings))
