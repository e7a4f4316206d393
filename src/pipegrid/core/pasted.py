"""
Caps as they come out of mails and browsers: quoted, broken over lines, or in the address of a gateway's page.

What they stand for is never in doubt, since nothing else begins like a cap, and a path ``http://`` has an
empty name in it. Nobody is asked at such an address; the cap in it is all that counts. What is not understood
stays as it is, for whoever reads caps to complain of.
"""

from __future__ import annotations

import re

CAP_STARTS = ("URI:", "ro.URI:", "imm.URI:")

_PAIRS = {
    '"': '"',
    "'": "'",
    "<": ">",
    "(": ")",
    "\u201c": "\u201d",
    "\u201e": "\u201c",
    "\u00ab": "\u00bb",
}
_GATEWAY = re.compile(r"https?://[^/?#]+/(?:uri|file|named|cap)/([^?#]+)")
_NAMED = "/@@named="
_BREAK = re.compile(r"(?<![ \t])[ \t]*\r?\n[ \t>]*")


def as_pasted(text: str) -> str:
    """
    Return a cap or path without what only carried it here.

    These go: blanks and quotation marks around it, marks of quoted mail before it, ends of lines within the
    cap (in names behind it they stay), a gateway's address before it, and with that, or in ``URI%3A``,
    percent signs.
    """
    text = text.strip()
    if text.startswith(CAP_STARTS):
        return _joined(text)
    bare = text.lstrip("> \t")
    closing = _PAIRS.get(bare[:1])
    if closing is not None and bare.endswith(closing):
        bare = bare[1:-1].strip()
    if bare.startswith(CAP_STARTS):
        return _joined(bare)
    address = _GATEWAY.match(bare)
    if address is not None:
        bare = address[1].partition(_NAMED)[0]
    elif not bare.startswith("URI%3A"):
        return text
    from urllib.parse import unquote  # hardly ever needed

    parts = [unquote(part) for part in _joined(bare).split("/")]
    if not parts[0].startswith(CAP_STARTS) or any("/" in part for part in parts):
        return text  # a name with a slash in it has no path
    return "/".join(parts)


def _joined(text: str) -> str:
    if "\n" not in text:
        return text
    cap, slash, names = text.partition("/")
    return _BREAK.sub("", cap) + slash + names
