"""
Arguments of a request: those in the query string override fields of a form.

Case matters in ``t``, but not in booleans, ``replace`` and ``format``. Unknown arguments are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal
from urllib.parse import parse_qsl, unquote_to_bytes

import attrs
from multipart import parse_options_header

from pipegrid.core.text import printable
from pipegrid.gateway.body_spool import BodySpool
from pipegrid.gateway.form_body import FormBody, FormFile
from pipegrid.gateway.gateway_settings import GatewayLimits
from pipegrid.gateway.http_response import WebError

Replace = Literal["true", "false", "only-files"]

MAX_FIELDS = 100
MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"
_TRUE = frozenset({"true", "t", "1", "on"})
_FALSE = frozenset({"false", "f", "0", "off"})


@attrs.frozen
class Arguments:
    """
    The arguments of one request; if an argument is repeated, its first value counts.

    Attributes:
        values: by name.
        files: files of the form.
        is_form: whether the body was a form; if so, it has been parsed.
    """

    values: Mapping[str, str] = attrs.field(factory=dict)
    files: Sequence[FormFile] = ()
    is_form: bool = False

    @property
    def operation(self) -> str:
        """The argument ``t``, without surrounding white space; empty if not given."""
        return self.values.get("t", "").strip()

    def text(self, name: str, otherwise: str = "") -> str:
        """Return the value of an argument; ``otherwise`` if not given."""
        return self.values.get(name, otherwise)

    def get(self, name: str) -> str | None:
        """Return the value of an argument; None if not given."""
        return self.values.get(name)

    def flag(self, name: str, otherwise: bool = False) -> bool:
        """
        Return a boolean argument; ``otherwise`` if not given.

        Raises:
            WebError: the value is not a boolean.
        """
        given = self.values.get(name)
        if given is None:
            return otherwise
        return parse_flag(name, given)

    def replace(self) -> Replace:
        """
        Return the argument ``replace``; ``true`` if not given.

        Raises:
            WebError: the value is neither a boolean nor ``only-files``.
        """
        given = self.values.get("replace", "true")
        if given.lower() == "only-files":
            return "only-files"
        return "true" if parse_flag("replace", given) else "false"

    def format(self) -> str | None:
        """
        Return ``CHK``, ``SDMF`` or ``MDMF``, from the argument ``format`` or else from ``mutable``; None:
        neither asks for a format.

        Raises:
            WebError: the format does not exist.
        """
        given = self.values.get("format", "").strip().upper()
        if given:
            if given not in ("CHK", "SDMF", "MDMF"):
                raise WebError(
                    400,
                    f"Unknown format: '{printable(given.lower()[:40])}'; it is CHK, SDMF or MDMF",
                )
            return given
        if self.flag("mutable"):
            return "SDMF"
        return None


def parse_flag(name: str, given: str) -> bool:
    """
    Return the boolean value of an argument.

    Raises:
        WebError: the value is not a boolean.
    """
    lowered = given.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise WebError(400, f"the argument {name} must be true or false")


def decode_path(path: bytes) -> list[str]:
    """
    Return the decoded parts of a path, without the empty part before its first slash.

    Raises:
        WebError: a part is not UTF-8.
    """
    try:
        return [unquote_to_bytes(part).decode("utf-8") for part in path.split(b"/")[1:]]
    except UnicodeDecodeError:
        raise WebError(400, "the path is not UTF-8; percent-encode names in UTF-8") from None


def read_arguments(
    method: bytes, query: bytes, content_type: str, body: BodySpool, most_bytes: int
) -> Arguments:
    """
    Return the arguments of a request.

    Args:
        content_type: media type of the body; empty if there is none.
        most_bytes: maximum size of a form's fields, without its files.

    Raises:
        WebError: the arguments are malformed, or too many.
        BodyRefused: the body was dropped.
    """
    values = _parse_query(query)
    if isinstance(body, FormBody):
        return Arguments({**body.fields(), **values}, body.chosen_files(), True)
    if method == b"POST" and form_kind(content_type)[0] == URLENCODED:
        fields = _parse_query(body.read_all(most_bytes, "the form"))
        return Arguments({**fields, **values}, (), True)
    return Arguments(values)


_LISTS = frozenset({"mkdir-with-children", "mkdir-immutable", "set_children", "set-children"})
_MUTABLE_CAP = re.compile(rb"/[^/]*/URI(?::|%3A)(?:SSK|MDMF)(?::|%3A)[^/]*\Z", re.IGNORECASE)


def most_body_bytes(
    method: bytes, path: bytes, content_type: str, limits: GatewayLimits
) -> int | None:
    """
    Return the maximum size of a request body, given the head of the request.

    None: no limit, for a form with files, a body that becomes an immutable file, or malformed arguments.

    Args:
        path: path of the request, with its query.
    """
    place, _, query = path.partition(b"?")
    try:
        arguments = Arguments(_parse_query(query))
        operation, chosen = arguments.operation, arguments.format()
    except WebError:  # handling the request raises this again, if needed
        return None
    kind = form_kind(content_type)[0] if method == b"POST" else ""
    if kind == MULTIPART:
        return None
    if kind == URLENCODED:
        return limits.form_bytes
    if operation in _LISTS:
        return limits.children_bytes
    if operation:
        return limits.text_bytes
    is_mutable = chosen in ("SDMF", "MDMF") or "offset" in arguments.values
    return limits.mutable_bytes if is_mutable or _MUTABLE_CAP.match(place) else None


def form_kind(content_type: str) -> tuple[str, str]:
    """
    Return the media type of a body, in lower case, and the boundary of a form with files (otherwise empty).
    """
    kind, options = parse_options_header(content_type) if content_type else ("", {})
    return kind.lower(), options.get("boundary", "") if kind.lower() == MULTIPART else ""


def _parse_query(query: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except UnicodeDecodeError:
        raise WebError(400, "an argument is not UTF-8; percent-encode arguments in UTF-8") from None
    except ValueError:
        raise WebError(400, f"the request has more than {MAX_FIELDS} arguments") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        found.setdefault(name, value)
    return found
