"""The messages of an invitation to a grid, and the limits on their content."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from pipegrid.core import base32
from pipegrid.core.caps import DirectoryCap, parse_cap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import CapError, InvitationError, UsageError
from pipegrid.grid.servers_and_introducers_yaml import MAX_INTRODUCERS, IntroducerAddress
from pipegrid.wire import server_address
from pipegrid.wire.announcements import BUNDLES, FURL, NURLS, SEED, KnownServer, describe, printable
from pipegrid.wire.grid_manager_certificates import CERTIFICATES, ManagerKey, parse_manager_key

# The messages are those of Tahoe-LAFS's ``tahoe invite`` and ``tahoe create-client --join``. An end that also
# has the ability ``pipegrid-v1`` sends and reads more fields and messages. All messages are JSON objects:
#
#     inviter -> joiner    {"abilities": {"server-v1": {}, "pipegrid-v1": {}}}
#     joiner -> inviter    {"abilities": {"client-v1": {}, "pipegrid-v1": {}}}
#     inviter -> joiner    {"shares-needed": 1, "shares-total": 3, "shares-happy": 2, "introducer": "pb://...",
#                           "nickname": "...",
#                           "pipegrid": {"servers": {ID: {"ann": {...}}}, "introducers": {NAME: FURL},
#                                        "managers": {NAME: KEY}, "caps": {ALIAS: CAP}}}
#
# If either end is Tahoe-LAFS, no more messages follow. Otherwise the joiner then reports whether it has
# joined. If its directory has a storage server that wants to be added to the inviter's list, the joiner also
# describes this server, and the inviter answers:
#
#     joiner -> inviter    {"joined": true, "servers": {ID: {"ann": {...}}}}
#     inviter -> joiner    {"added": true, "shares-needed": 1, "shares-total": 3, "shares-happy": 2}
#
# Each end treats the other as hostile: sizes, counts, names and caps are checked before anything is written,
# unknown fields are ignored, and a malformed object is refused as a whole.

APP_ID = "tahoe-lafs.org/invite"
"""The name of this kind of exchange on a relay; both programs must use the same."""

MAX_MESSAGE_BYTES = 256 << 10
MAX_SERVERS = 256
MAX_CAPS = 100
MAX_MANAGERS = 16
MAX_CAP_CHARACTERS = 4096
_MAX_NAME_CHARACTERS = 100
_MAX_DIGITS = 19

_CODE = re.compile(r"[0-9]{1,9}-\S{1,100}\Z")

INVITER, CLIENT, OURS = "server-v1", "client-v1", "pipegrid-v1"

DEFAULT_NUMBERS = (3, 10, 7)
"""Needed shares, total shares and servers of happiness if an invitation does not name them."""


def checked_code(text: str) -> str:
    """
    Return an invitation's code; spaces between its words become hyphens.

    Raises:
        UsageError: the text is not a code.
    """
    code = "-".join(text.split())
    if _CODE.match(code) is None:
        raise UsageError(
            f"{printable(text[:40])!r} is not a code; it looks like 7-guitarist-revenge: copy all of it"
        )
    return code


def checked_relay(url: str) -> str:
    """
    Return a relay's address if it is valid.

    Raises:
        UsageError: the text is not a relay's address.
    """
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_good = False
    if not is_good or not url.isascii() or not url.isprintable() or len(url) > 1000:
        raise UsageError(
            f"{printable(url[:60])!r} is not a relay's address; it looks like ws://HOST:PORT/v1"
        )
    return url


@attrs.frozen
class GridNumbers:
    """
    The encoding parameters of a grid.

    Attributes:
        params: needed and total shares.
        happy: servers of happiness.
    """

    params: Params
    happy: int

    def fields(self) -> dict[str, int]:
        """Return the numbers as the fields of a message."""
        return {
            "shares-needed": self.params.required_shares,
            "shares-total": self.params.total_shares,
            "shares-happy": self.happy,
        }


@attrs.frozen
class Invitation:
    """
    All that a new member of a grid receives.

    Attributes:
        numbers: the grid's encoding parameters.
        servers: the servers in the inviter's own list.
        introducers: introducers, which name further servers.
        caps: caps of directories, by the inviter's names for them; the names are not checked yet.
        managers: the grid managers; if there are any, only servers with their certificates get shares.
        nickname: the nickname of the new client, or empty.
        skipped: a sentence for each part that this version cannot use.
    """

    numbers: GridNumbers
    servers: tuple[KnownServer, ...] = ()
    introducers: tuple[IntroducerAddress, ...] = ()
    caps: Mapping[str, DirectoryCap] = attrs.field(factory=dict, repr=False)
    managers: tuple[ManagerKey, ...] = ()
    nickname: str = ""
    skipped: tuple[str, ...] = ()

    def with_server(self, server: KnownServer, numbers: GridNumbers) -> Invitation:
        """Return the invitation with one more server, and with the inviter's new encoding parameters."""
        return attrs.evolve(self, servers=(*self.servers, server), numbers=numbers)

    def with_nickname(self, nickname: str) -> Invitation:
        """Return the invitation with another nickname for the new client."""
        return attrs.evolve(self, nickname=nickname)

    def as_message(self) -> bytes:
        """
        Return the invitation as the message that a joiner reads.

        Raises:
            UsageError: the message is larger than a joiner accepts.
        """
        fields: dict[str, Any] = dict(self.numbers.fields())
        if self.introducers:
            fields["introducer"] = str(self.introducers[0].furl)
        if self.nickname:
            fields["nickname"] = self.nickname
        fields["pipegrid"] = {
            "servers": entries_of(self.servers),
            "introducers": {each.name: str(each.furl) for each in self.introducers},
            "managers": {each.name: str(each) for each in self.managers},
            "caps": {name: str(cap) for name, cap in self.caps.items()},
        }
        counts = len(self.servers) <= MAX_SERVERS and len(self.caps) <= MAX_CAPS
        data = json.dumps(fields).encode("ascii")
        if not counts or len(data) > MAX_MESSAGE_BYTES:
            raise UsageError(
                f"an invitation has at most {MAX_SERVERS} servers and {MAX_CAPS} caps in "
                f"{MAX_MESSAGE_BYTES >> 10} KiB; name fewer caps, or use an introducer"
            )
        return data


def parse_invitation(data: bytes) -> Invitation:
    """
    Return the invitation in an inviter's message.

    Raises:
        InvitationError: the message makes no sense, or names neither servers nor introducers that can be
            used.
    """
    fields = _object(data, "the invitation")
    more = fields.get("pipegrid", {})
    if not isinstance(more, dict):
        raise _nonsense("the invitation")
    servers, skipped = _servers(more.get("servers", {}), "the invitation")
    introducers = _introducers(fields.get("introducer"), more.get("introducers", {}))
    if not servers and not introducers:
        raise InvitationError(
            "the invitation names neither an introducer nor a server that can be used; ask its sender to "
            "set the grid up first"
        )
    nickname = fields.get("nickname")
    return Invitation(
        numbers=_numbers(fields, "the invitation"),
        servers=servers,
        introducers=introducers,
        caps=_caps(more.get("caps", {})),
        managers=_managers(more.get("managers", {})),
        nickname=printable(nickname) if isinstance(nickname, str) else "",
        skipped=skipped,
    )


def abilities_message(*abilities: str) -> bytes:
    """Return the first message of an end, which lists its abilities."""
    return json.dumps({"abilities": {each: {} for each in abilities}}).encode("ascii")


def is_ours(data: bytes, needed: str) -> bool:
    """
    Return whether the other end is PipeGrid.

    Args:
        data: the first message of the other end.
        needed: the ability of the other end, which both PipeGrid and Tahoe-LAFS have.

    Raises:
        InvitationError: the other end does not have this ability.
    """
    abilities = _object(data, "the other end").get("abilities")
    if not isinstance(abilities, dict) or needed not in abilities:
        what = "an inviter" if needed == INVITER else "a client that joins"
        raise InvitationError(
            f"the other end of this code is not {what}; one runs 'pipegrid invite', the other 'pipegrid join'"
        )
    return OURS in abilities


@attrs.frozen
class JoinReply:
    """
    The answer of a joiner.

    Attributes:
        joined: whether the joiner has accepted the invitation.
        server: the joiner's storage server, to be added to the inviter's list; None if there is none to add.
    """

    joined: bool
    server: KnownServer | None = None

    def as_message(self) -> bytes:
        """Return the answer as the message that the inviter reads."""
        fields: dict[str, Any] = {"joined": self.joined}
        if self.server is not None:
            fields["servers"] = entries_of([self.server])
        return json.dumps(fields).encode("ascii")


def parse_join_reply(data: bytes) -> JoinReply:
    """
    Return a joiner's answer.

    Raises:
        InvitationError: the answer makes no sense, or offers more than one server.
    """
    fields = _object(data, "the answer")
    servers, skipped = _servers(fields.get("servers", {}), "the answer")
    if len(servers) > 1 or skipped:
        raise _nonsense("the answer")
    return JoinReply(fields.get("joined") is True, servers[0] if servers else None)


@attrs.frozen
class AddReply:
    """
    The inviter's answer to a joiner that asked to add its server.

    Attributes:
        added: whether the server was added.
        numbers: the inviter's encoding parameters from now on.
    """

    added: bool
    numbers: GridNumbers

    def as_message(self) -> bytes:
        """Return the answer as the message that the joiner reads."""
        return json.dumps({"added": self.added, **self.numbers.fields()}).encode("ascii")


def parse_add_reply(data: bytes) -> AddReply:
    """
    Return an inviter's answer.

    Raises:
        InvitationError: the answer makes no sense.
    """
    fields = _object(data, "the answer")
    return AddReply(fields.get("added") is True, _numbers(fields, "the answer"))


def entries_of(servers: Iterable[KnownServer]) -> dict[str, dict[str, Any]]:
    """Return servers as the entries of a ``servers.yaml``, by server id."""
    return {each.identity.server_id: {"ann": _announced(each)} for each in servers}


def _announced(server: KnownServer) -> dict[str, Any]:
    """
    Return the announcement of a server: all that a client must know of it, from whichever file or introducer
    it came.
    """
    fields: dict[str, Any] = {"nickname": server.identity.nickname}
    nurls = [server.nurl, *server.other_nurls] if server.nurl is not None else []
    if nurls:
        fields[NURLS] = [str(each) for each in nurls]
    if server.furl is not None:
        fields[FURL] = str(server.furl)
    fields[SEED] = base32.encode(server.identity.permutation_seed)
    if server.bundle_bytes:
        fields[BUNDLES] = server.bundle_bytes
    if server.certificates:
        fields[CERTIFICATES] = [each._asdict() for each in server.certificates]
    return fields


def _object(data: bytes, what: str) -> dict[str, Any]:
    """
    Return the JSON object in a message. Long numbers are refused, since parsing them takes quadratic time.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvitationError(
            f"{what} has {len(data)} bytes, and {MAX_MESSAGE_BYTES} are allowed; ask for a smaller one"
        )
    try:
        found = json.loads(data.decode("utf-8"), parse_int=_whole)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _nonsense(what)
    return found


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("too many digits")
    return int(text)


def _nonsense(what: str) -> InvitationError:
    return InvitationError(
        f"{what} makes no sense; both ends need a current version of PipeGrid or Tahoe-LAFS"
    )


def _map(value: object, what: str, most: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _nonsense(what)
    if len(value) > most:
        raise InvitationError(
            f"{what} has {len(value)} entries where {most} are allowed; ask for a smaller one"
        )
    return value


def _numbers(fields: Mapping[str, Any], what: str) -> GridNumbers:
    """Return the encoding parameters in a message; Tahoe-LAFS sends them as texts or null."""
    numbers = []
    names = ("shares-needed", "shares-total", "shares-happy")
    for name, default in zip(names, DEFAULT_NUMBERS, strict=True):
        value = fields.get(name)
        if value is None:
            value = default
        text = str(value).strip()
        if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) < 4):
            raise _nonsense(what)
        numbers.append(int(text))
    needed, total, happy = numbers
    try:
        params = Params(needed, total)
    except UsageError as error:
        raise InvitationError(f"{what} makes no sense: {error}") from None
    if not 1 <= happy <= total:
        raise InvitationError(
            f"{what} makes no sense: {total} shares can never be on {happy} servers; ask for another"
        )
    return GridNumbers(params, happy)


def _servers(value: object, what: str) -> tuple[tuple[KnownServer, ...], tuple[str, ...]]:
    """Return the servers that can be used, and a sentence for each of the others."""
    found: list[KnownServer] = []
    skipped = []
    for server_id, entry in _map(value, what, MAX_SERVERS).items():
        fields = entry.get("ann") if isinstance(entry, dict) else None
        try:
            if not isinstance(fields, dict):
                raise ValueError("it has no map under 'ann'")
            found.append(describe(server_id, fields))
        except ValueError as error:
            shown = printable(server_id[:60])
            skipped.append(f"server {shown!r} of {what} is skipped: {error}")
    return tuple(found), tuple(skipped)


def _introducers(first: object, named: object) -> tuple[IntroducerAddress, ...]:
    texts = dict(_map(named, "the invitation", MAX_INTRODUCERS))
    if first is not None and first not in texts.values():
        texts.pop("default", None)
        texts = {"default": first, **texts}
    found = []
    for name, text in texts.items():
        shown = printable(name)
        if not shown or len(name) > _MAX_NAME_CHARACTERS or not isinstance(text, str):
            raise _nonsense("the invitation")
        try:
            furl = server_address.parse_furl(text.strip())
        except UsageError as error:
            raise InvitationError(
                f"the invitation makes no sense: introducer {shown!r}: {error}"
            ) from None
        if not furl.has_address:
            raise InvitationError(
                f"introducer {shown!r} of the invitation has no address for TCP or Tor, and only those are "
                "supported; ask for another grid"
            )
        found.append(IntroducerAddress(shown, furl))
    return tuple(found)


def _caps(value: object) -> dict[str, DirectoryCap]:
    found = {}
    for name, text in _map(value, "the invitation", MAX_CAPS).items():
        if not isinstance(text, str) or not 0 < len(text) <= MAX_CAP_CHARACTERS:
            raise _nonsense("the invitation")
        try:
            cap = parse_cap(text)
        except CapError:
            cap = None
        if not isinstance(cap, DirectoryCap):
            raise InvitationError(
                f"{printable(name[:60])!r} in the invitation is not the cap of a directory; ask for another "
                "invitation"
            )
        found[name] = cap
    return found


def _managers(value: object) -> tuple[ManagerKey, ...]:
    found = []
    for name, text in _map(value, "the invitation", MAX_MANAGERS).items():
        is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not is_name or len(name) > _MAX_NAME_CHARACTERS or not isinstance(text, str):
            raise _nonsense("the invitation")
        try:
            found.append(parse_manager_key(name, text))
        except UsageError as error:
            raise InvitationError(f"the invitation makes no sense: {error}") from None
    return tuple(found)
