"""A client's directory before and after an invitation."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import yaml
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.disk.atomic_write import create_file
from pipegrid.errors import InvitationError, PipegridError, SinkError, UsageError
from pipegrid.grid import client_creation, invite_and_join, user_grids
from pipegrid.grid.client_config import connections_of, load
from pipegrid.grid.client_creation import ClientPreferences, create_client, create_local
from pipegrid.grid.invitation_messages import GridNumbers, Invitation, entries_of
from pipegrid.grid.servers_and_introducers_yaml import (
    IntroducerAddress,
    parse_static_servers,
    with_servers,
)
from pipegrid.server import identity
from pipegrid.server.identity import load_or_create
from tests.grid.introducer_support import FURL
from tests.grid.test_invitation import LITERAL, server
from tests.grid.test_tahoe_directory import make_node
from tests.grid.test_tahoe_directory import tree as content_of

ONE = GridNumbers(Params(1, 1), 1)


def invited(*numbers: int, **more: Any) -> Invitation:
    """Return an invitation to these servers."""
    params, happy = client_creation.suggested(len(numbers) or 1)
    return Invitation(GridNumbers(params, happy), tuple(map(server, numbers)), **more)


def names_in(directory: Path) -> list[str]:
    """Return the ids in a directory's list of servers."""
    return [each.identity.server_id for each in load(directory).static.servers]


class MemberTests(SynchronousTestCase):
    """``create_member`` and ``invitation_of``."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()
        self.directory = self.root / "client"

    def test_the_proxy_is_kept(self) -> None:
        """A second directory uses the SOCKS proxy of the first, and others cannot read its password."""
        socks = "port = 127.0.0.1:1\nusername = joe\npassword = secret"
        own = self.root / "own"
        create_client(own, params=Params(1, 1), happy=1)
        with (own / "pipegrid.cfg").open("a") as file:
            file.write(f"[connections]\ntcp = socks\n[socks]\n{socks}\n")
        policy, said = connections_of(own)
        preferences = ClientPreferences(connections=said)
        invite_and_join.create_member(self.directory, invited(1), preferences=preferences)
        self.assertEqual(connections_of(self.directory), (policy, said))
        self.assertEqual((self.directory / "pipegrid.cfg").stat().st_mode & 0o777, 0o600)
        config = own / "pipegrid.cfg"
        config.write_text(config.read_text().replace("username = joe\n", ""))
        with self.assertRaisesRegex(UsageError, "username is missing"):
            connections_of(own)

    def test_an_invitation_makes_a_directory(self) -> None:
        """It invites to the same grid in turn."""
        offered = invited(1, 2, introducers=(IntroducerAddress("mine", FURL),))
        invite_and_join.create_member(self.directory, offered, aliases=f"photos: {LITERAL}\n")
        self.assertEqual(invite_and_join.invitation_of(self.directory), offered)
        text = (self.directory / "private/aliases").read_text()
        self.assertEqual(text, f"photos: {LITERAL}\n")
        self.assertEqual([each.name for each in self.root.iterdir()], ["client"])

    def test_it_appears_as_a_whole(self) -> None:
        """Where one of its files cannot be written there is nothing."""
        for number in range(4):
            full = OSError(errno.ENOSPC, "No space left on device")
            writes = [*[mock.DEFAULT] * number, full]
            with (
                mock.patch.object(
                    client_creation, "create_file", side_effect=writes, wraps=create_file
                ),
                self.assertRaisesRegex(SinkError, "free some space"),
            ):
                invite_and_join.create_member(self.directory, invited(1), aliases=f"a: {LITERAL}\n")
            self.assertEqual(list(self.root.iterdir()), [])

    def test_in_a_servers_directory(self) -> None:
        """What belongs to the server stays, whether it works or not."""
        load_or_create(self.directory)
        before = content_of(self.directory)
        with (
            mock.patch.object(client_creation, "SECRET_BYTES", "none"),
            self.assertRaises(Exception),  # noqa: B017  whatever it is
        ):
            invite_and_join.create_member(self.directory, invited(1))
        self.assertEqual(content_of(self.directory).keys(), before.keys())
        node = ClientPreferences(node={"tub.port": "tcp:1"}, announce=True)
        invite_and_join.create_member(self.directory, invited(1), preferences=node)
        text = (self.directory / "pipegrid.cfg").read_text()
        self.assertIn("[node]\ntub.port = tcp:1\n\n[storage]\nannounce = true\n", text)
        self.assertEqual(load(self.directory).happy, 1)

    def test_the_automatic_grid_gives_way(self) -> None:
        """It is moved once the new one is complete."""
        create_local(self.directory, servers=1, automatic=True)
        moved: list[Path] = []
        invite_and_join.create_member(self.directory, invited(1), moved=moved.append)
        self.assertEqual(moved, [(self.root / "client-local").absolute()])
        self.assertIsNone(load(self.directory).local)
        self.assertIsNotNone(load(moved[0]).local)

    def test_it_does_not_give_way_to_half_a_grid(self) -> None:
        """A full disk leaves it where it is."""
        create_local(self.directory, servers=1, automatic=True)
        full = OSError(errno.ENOSPC, "full")
        with (
            mock.patch.object(client_creation, "create_file", side_effect=full),
            self.assertRaises(SinkError),
        ):
            invite_and_join.create_member(self.directory, invited(1), moved=self.fail)
        self.assertIsNotNone(load(self.directory).local)

    def test_a_grid_of_this_machine_invites_no_one(self) -> None:
        """The sentence says what to do."""
        create_local(self.directory, servers=1)
        with self.assertRaisesRegex(UsageError, "which no other client reaches; start a server"):
            invite_and_join.invitation_of(self.directory)

    def test_what_cannot_be_joined(self) -> None:
        """It is known before a code is used: a node's directory, and one with another grid's files."""
        make_node(self.directory)
        before = content_of(self.directory)
        with self.assertRaisesRegex(UsageError, "is a Tahoe-LAFS node's directory"):
            invite_and_join.check_can_join(self.directory)
        self.assertEqual(content_of(self.directory), before)
        other = self.root / "other"
        (other / "private").mkdir(parents=True)
        invite_and_join.check_can_join(other)
        (other / "private/aliases").write_text("")
        with self.assertRaisesRegex(UsageError, "exists already, and may be another grid's"):
            invite_and_join.check_can_join(other)

    def test_another_grid(self) -> None:
        """One server in common makes it the same grid; without any it is refused."""
        invite_and_join.create_member(self.directory, invited(1, 2))
        invite_and_join.refuse_other_grid(self.directory, invited(2, 3))
        with self.assertRaisesRegex(InvitationError, "uses another grid already"):
            invite_and_join.refuse_other_grid(self.directory, invited(3))
        invite_and_join.refuse_other_grid(self.root / "nothing", invited(3))


class OwnServerTests(SynchronousTestCase):
    """A directory in which a server runs."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def serve(self) -> None:
        """Leave the files that a running server has."""
        who = load_or_create(self.directory)
        identity.keep_furl(self.directory, who.furl(["tcp:127.0.0.1:8098"]))

    def test_it_becomes_a_client_of_its_own_server(self) -> None:
        """So its owner can invite others at once; a second time changes nothing."""
        self.serve()
        sentence = invite_and_join.include_own_server(self.directory)
        self.assertIn("a client of a new grid with its own server", sentence or "")
        self.assertIsNone(invite_and_join.include_own_server(self.directory))
        offered = invite_and_join.invitation_of(self.directory)
        self.assertEqual(offered.numbers, ONE)
        self.assertEqual(invite_and_join.unreachable_servers(offered.servers), ["127.0.0.1:8098"])

    def test_it_is_added_to_a_list(self) -> None:
        """Where the directory was a client's before."""
        create_client(
            self.directory,
            params=Params(1, 1),
            happy=1,
            files={"private/servers.yaml": json.dumps({"storage": entries_of([server(1)])})},
        )
        self.serve()
        self.assertIn("added", invite_and_join.include_own_server(self.directory) or "")
        self.assertEqual(len(names_in(self.directory)), 2)

    def test_nothing_is_configured(self) -> None:
        """The sentence says what to do."""
        with self.assertRaisesRegex(UsageError, "no grid is configured in .*'pipegrid serve'"):
            invite_and_join.include_own_server(self.directory)


class AddServersTests(SynchronousTestCase):
    """``add_servers`` and ``with_servers``."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        invite_and_join.create_member(self.directory, invited(1))

    def test_numbers_follow(self) -> None:
        """As long as they are the suggested ones."""
        self.assertEqual(
            len(invite_and_join.add_servers(self.directory, [server(2), server(3)])), 2
        )
        config = load(self.directory)
        self.assertEqual((config.params, config.happy), client_creation.suggested(3))

    def test_a_link_stays_a_link(self) -> None:
        """A list that is a symbolic link is changed where it is, as other settings are."""
        path = self.directory / "private/servers.yaml"
        elsewhere = path.with_name("listed elsewhere")
        path.rename(elsewhere)
        path.symlink_to(elsewhere.name)
        self.assertEqual(len(invite_and_join.add_servers(self.directory, [server(2)])), 1)
        self.assertTrue(path.is_symlink())
        self.assertEqual(len(yaml.safe_load(elsewhere.read_text())["storage"]), 2)

    def test_chosen_numbers_stay(self) -> None:
        """Nothing that the user chose is changed."""
        invite_and_join.add_servers(self.directory, [server(2)])
        client_creation.change(self.directory, {"required_shares": 2}, 2)
        invite_and_join.add_servers(self.directory, [server(3)])
        config = load(self.directory)
        self.assertEqual((config.params, config.happy), (Params(2, 2), 2))

    def test_a_known_server_stays_as_it_is(self) -> None:
        """A liar cannot lead a client elsewhere: with another address, or another id, it is the same."""
        other = server(1)
        assert other.nurl is not None
        other = other._replace(nurl=attrs.evolve(other.nurl, host="evil.example.org"))
        path = self.directory / "private/servers.yaml"
        before = path.read_text()
        self.assertEqual(invite_and_join.add_servers(self.directory, [other]), [])
        self.assertEqual(path.read_text(), before)

    def test_a_list_that_was_written_by_hand(self) -> None:
        """Comments and what only other programs read stay."""
        path = self.directory / "private/servers.yaml"
        entry = json.dumps(entries_of([server(1)])["spki-1"])
        path.write_text(f"# mine\nstorage:\n    # the first\n    spki-1: {entry}\n    # the end")
        invite_and_join.add_servers(self.directory, [server(2)])
        self.assertIn("# mine", path.read_text())
        self.assertIn("# the end", path.read_text())
        self.assertEqual(names_in(self.directory), ["spki-1", "spki-2"])

    def test_forms_of_a_list(self) -> None:
        """What is added is in it, and all else as before; or nothing is changed."""
        more = entries_of([server(2)])
        texts = (
            "",
            "storage:\n",
            "storage: {}\n",
            '{"storage": {"a": {"x": 1}}}',
            "storage:\n  a: {x: 1}\n",
            "storage:\n  a:\n    x: 1\n",
            "storage: {a: {x: 1}}\n",
            "storage:\n\ta: 1\n",
            "other: 1\n",
            "storage: 5\n",
            "storage:\n  a: |\n    text\n",
        )
        done = 0
        for text in texts:
            try:
                found = with_servers(text.encode(), more, "the list")
            except UsageError:
                continue
            done += 1
            listed = (yaml.safe_load(text) or {}).get("storage") or {}
            self.assertEqual(yaml.safe_load(found), {"storage": {**listed, **more}}, text)
            self.assertEqual(len(parse_static_servers(found.encode(), "it").servers), 1)
        self.assertEqual(done, 7, texts)

    def test_a_node_of_tahoe_lafs(self) -> None:
        """It is never written; the sentence says so."""
        node = Path(self.mktemp())
        make_node(node, a="pb://nothing")
        before = content_of(node)
        with self.assertRaisesRegex(UsageError, "never written; add the server .* by hand"):
            invite_and_join.add_servers(node, [server(2)])
        self.assertEqual(content_of(node), before)


class UserGridsTests(SynchronousTestCase):
    """Several grids of one user."""

    def setUp(self) -> None:
        self.own = Path(self.mktemp())
        invite_and_join.create_member(self.own, invited(1))

    def test_a_second_grid(self) -> None:
        """It is found by its name, in any case."""
        place = user_grids.place_for_grid(self.own, "Friends")
        invite_and_join.create_member(place, invited(2))
        user_grids.name_grid(self.own, "friends", place)
        self.assertEqual(user_grids.grids_of(self.own), {"friends": self.own / "grids/friends"})
        self.assertEqual(names_in(user_grids.grid_directory(self.own, "FRIENDS")), ["spki-2"])
        with self.assertRaisesRegex(UsageError, "there is a grid 'friends' already"):
            user_grids.place_for_grid(self.own, "friends")

    def test_no_such_grid(self) -> None:
        """The sentence names those that exist."""
        with self.assertRaisesRegex(UsageError, "names no grid 'work' \\(there is none yet\\)"):
            user_grids.grid_directory(self.own, "work")

    def test_names(self) -> None:
        """None leads out of the directory."""
        for name in ("", "..", "a/b", "a b", "-a", "a" * 41, ".a", "a=b", "ä"):
            with self.assertRaises(UsageError):
                user_grids.checked_grid_name(name)

    def test_settings_can_still_be_changed(self) -> None:
        """A new section leaves the others where they are."""
        user_grids.name_grid(self.own, "work", self.own / "grids/work")
        invite_and_join.set_announced(self.own, {"tub.port": "tcp:1"}, True)
        invite_and_join.set_announced(self.own, {"tub.port": "tcp:2"}, True)
        text = (self.own / "pipegrid.cfg").read_text()
        self.assertEqual((text.count("tcp:1"), text.count("tcp:2")), (1, 0))
        try:
            client_creation.change(self.own, {"total_shares": 1}, 1)
        except PipegridError as error:
            self.fail(str(error))
