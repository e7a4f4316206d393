"""The messages of an invitation: what one end writes the other reads, and nonsense is refused as a whole."""

from __future__ import annotations

import contextlib
import json
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import DirectoryCap, parse_cap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import InvitationError, UsageError
from pipegrid.grid.invitation_messages import (
    CLIENT,
    INVITER,
    MAX_MESSAGE_BYTES,
    MAX_SERVERS,
    AddReply,
    GridNumbers,
    Invitation,
    JoinReply,
    abilities_message,
    checked_code,
    checked_relay,
    is_ours,
    parse_add_reply,
    parse_invitation,
    parse_join_reply,
)
from pipegrid.grid.servers_and_introducers_yaml import IntroducerAddress
from pipegrid.wire.announcements import describe
from pipegrid.wire.grid_manager_certificates import parse_manager_key
from tests.grid.introducer_support import FURL, key, nurl

NUMBERS = GridNumbers(Params(1, 3), 2)
LITERAL = cast(DirectoryCap, parse_cap("URI:DIR2-LIT:"))


def server(number: int) -> Any:
    """Return a server of the test's."""
    fields = {"nickname": f"server-{number}", "anonymous-storage-NURLs": [nurl(number)]}
    return describe(f"spki-{number}", fields)


def message(**fields: Any) -> bytes:
    """Return an invitation with one server, but for these fields."""
    ours = {"servers": {"a": {"ann": {"anonymous-storage-NURLs": [nurl(1)]}}}}
    return json.dumps({"pipegrid": ours, **fields}).encode()


class InvitationTests(SynchronousTestCase):
    """From one end to the other."""

    def test_all_that_is_offered_arrives(self) -> None:
        """GridNumbers, servers, introducers, caps, managers, nickname."""
        offered = Invitation(
            NUMBERS,
            (server(1), server(2)),
            (IntroducerAddress("mine", FURL),),
            {"photos": LITERAL},
            (parse_manager_key("boss", f"pub-{key(3).server_id}"),),
            "carol",
        )
        self.assertEqual(parse_invitation(offered.as_message()), offered)

    def test_the_message_of_tahoe_lafs(self) -> None:
        """GridNumbers as texts, or none at all; one introducer."""
        fields = {
            "shares-needed": "3",
            "shares-total": "10",
            "shares-happy": None,
            "nickname": "dave",
            "introducer": str(FURL),
        }
        found = parse_invitation(json.dumps(fields).encode())
        self.assertEqual(found.numbers, GridNumbers(Params(3, 10), 7))
        self.assertEqual(found.introducers, (IntroducerAddress("default", FURL),))
        self.assertEqual((found.nickname, found.servers), ("dave", ()))

    def test_what_tahoe_lafs_reads(self) -> None:
        """The fields that its command looks for are at the top."""
        fields = json.loads(
            Invitation(NUMBERS, (), (IntroducerAddress("mine", FURL),)).as_message()
        )
        self.assertEqual(fields["introducer"], str(FURL))
        self.assertEqual(
            [fields[f"shares-{each}"] for each in ("needed", "total", "happy")], [1, 3, 2]
        )

    def test_nonsense_is_refused(self) -> None:
        """Whatever is wrong in it, nothing of an invitation is used."""
        caps = {"caps": {"a": "URI:CHK:"}}
        wrong: list[bytes] = [
            b"",
            b"[]",
            b"\xff",
            b"[" * 100_000,
            b'{"shares-needed": 1' + b"0" * 5000 + b"}",
            message(**{"shares-needed": 0}),
            message(**{"shares-needed": 4, "shares-total": 3}),
            message(**{"shares-happy": 11}),
            message(**{"shares-total": 1 << 40}),
            message(**{"shares-total": True}),
            message(introducer=7),
            message(introducer="pb://somewhere"),
            message(pipegrid=[]),
            message(pipegrid={"servers": []}),
            message(pipegrid={**caps, "introducers": {"a": str(FURL)}}),
            message(pipegrid={"introducers": {"a": str(FURL)}, "caps": {"a": "URI:CHK:" * 9999}}),
            message(pipegrid={"introducers": {"a": str(FURL)}, "managers": {"a\n[client]": "b"}}),
            message(pipegrid={"introducers": {"a": str(FURL)}, "managers": {"a": "pub-v0-x"}}),
            b"{" + b" " * MAX_MESSAGE_BYTES + b"}",
        ]
        for data in wrong:
            with self.assertRaises(InvitationError, msg=repr(data[:80])) as caught:
                parse_invitation(data)
            self.assertNotIn("\n", str(caught.exception))

    def test_too_many_servers(self) -> None:
        """They are counted before they are looked at."""
        servers: dict[str, Any] = {str(number): {} for number in range(MAX_SERVERS + 1)}
        with self.assertRaisesRegex(InvitationError, "has 257 entries where 256 are allowed"):
            parse_invitation(message(pipegrid={"servers": servers}))

    def test_servers_of_a_later_version(self) -> None:
        """Those that cannot be used are named; if no other way is left, the invitation is refused."""
        entries = {
            "good": {"ann": {"anonymous-storage-NURLs": [nurl(1)]}},
            "later\x1b": {"ann": {"anonymous-storage-NURLs": ["pb2://later"]}},
        }
        found = parse_invitation(message(pipegrid={"servers": entries}))
        self.assertEqual([each.identity.server_id for each in found.servers], ["good"])
        self.assertIn("server 'later?' of the invitation is skipped", found.skipped[0])
        del entries["good"]
        with self.assertRaisesRegex(InvitationError, "neither an introducer nor a server"):
            parse_invitation(message(pipegrid={"servers": entries}))

    def test_too_large_an_invitation(self) -> None:
        """The inviter hears of it, and not the joiner."""
        many = tuple(server(number) for number in range(MAX_SERVERS + 1))
        with self.assertRaisesRegex(UsageError, "use an introducer"):
            Invitation(NUMBERS, many).as_message()

    @given(st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(repr))
    def test_anything(self, data: bytes | str) -> None:
        """No bytes raise anything else."""
        data = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
        for parse in (parse_invitation, parse_join_reply, parse_add_reply):
            with contextlib.suppress(InvitationError):
                parse(data)


class ReplyTests(SynchronousTestCase):
    """What is said after the invitation."""

    def test_a_joiner(self) -> None:
        """It has joined or not, with a server or without."""
        for reply in (JoinReply(False), JoinReply(True), JoinReply(True, server(1))):
            self.assertEqual(parse_join_reply(reply.as_message()), reply)

    def test_a_joiner_with_many_servers(self) -> None:
        """It could fill the inviter's list: one person has one server."""
        two: dict[str, Any] = {"a": {"ann": {}}, "b": {"ann": {}}}
        with self.assertRaises(InvitationError):
            parse_join_reply(json.dumps({"joined": True, "servers": two}).encode())

    def test_an_inviter(self) -> None:
        """It says its numbers."""
        for added in (True, False):
            reply = AddReply(added, NUMBERS)
            self.assertEqual(parse_add_reply(reply.as_message()), reply)

    def test_abilities(self) -> None:
        """Those of Tahoe-LAFS suffice; two joiners, or two inviters, have nothing to say to each other."""
        self.assertFalse(is_ours(b'{"abilities": {"server-v1": {}}}', INVITER))
        self.assertTrue(is_ours(abilities_message(CLIENT, "pipegrid-v1"), CLIENT))
        for data in (b"{}", b'{"abilities": []}', abilities_message(CLIENT)):
            with self.assertRaisesRegex(InvitationError, "is not an inviter"):
                is_ours(data, INVITER)


class TypedTests(SynchronousTestCase):
    """What people type."""

    def test_codes(self) -> None:
        """Spaces are hyphens; what is no code is refused before anything is sent."""
        self.assertEqual(checked_code(" 7 guitarist revenge\n"), "7-guitarist-revenge")
        for text in ("", "guitarist", "7", "7-", "-7-a", "7-" + "a" * 200, "x7-a-b"):
            with self.assertRaises(UsageError):
                checked_code(text)

    def test_relays(self) -> None:
        """Only what a relay's address can be."""
        for text in ("ws://127.0.0.1:4000/v1", "wss://relay.example.org/v1"):
            self.assertEqual(checked_relay(text), text)
        for text in ("", "http://a/", "ws://", "ws://a:b/", "ws://a:99999/v1", "ws://a\n/v1"):
            with self.assertRaises(UsageError, msg=text):
                checked_relay(text)
