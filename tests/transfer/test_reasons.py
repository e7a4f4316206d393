"""What servers failed with, said once."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.transfer.failure_messages import each_once, joined_once, servers_full


class ReasonsTests(SynchronousTestCase):
    """One text from what many servers failed with."""

    def test_none(self) -> None:
        """There may be no reason at all."""
        self.assertEqual(joined_once({}), "")

    def test_one_reason_is_said_once(self) -> None:
        """With all servers whose it is, whichever share it was, and without advice of its own."""
        reasons = {
            name: f"{name} has share {number} under another secret; another client is uploading it"
            for number, name in enumerate(("t", "a", "b"))
        }
        self.assertEqual(joined_once(reasons), "a has a share under another secret (b, t too)")

    def test_a_name_is_no_part_of_a_word(self) -> None:
        """A server called t does not make a riddle of the text."""
        self.assertEqual(
            joined_once({"t": "No connection to t could be used (timeout)."}),
            "No connection to t could be used (timeout)",
        )

    def test_names_that_are_part_of_an_address(self) -> None:
        """A server's name is often the first part of its host's, which is told as it is."""
        reasons = {"a": "a: no such host: a.example.org", "b": "b: no such host: b.example.org"}
        self.assertEqual(each_once(reasons), list(reasons.values()))
        self.assertEqual(
            each_once({"a": "of my-a, a.", "b": "of my-a, b."}), ["of my-a, a (b too)"]
        )

    def test_a_name_that_comes_twice(self) -> None:
        """It is the same reason as another server's that is named twice."""
        reasons = {name: f"{name} is no friend of {name}" for name in "ab"}
        self.assertEqual(each_once(reasons), ["a is no friend of a (b too)"])

    def test_a_reason_without_a_name_gets_it(self) -> None:
        """What a disk failed with is told with the server."""
        self.assertEqual(joined_once({"s1": "the disk failed"}), "s1: the disk failed")
        self.assertEqual(joined_once({"a": "no", "b": "no"}), "a: no (b too)")

    def test_strange_names(self) -> None:
        """Names that are no words, or mean something in a pattern, are names all the same."""
        for name in ("a+b", "(x", ".*", "", "ünï"):
            reasons = {name: f"{name} is down; wait"}
            self.assertIn(f"{name} is down", joined_once(reasons))

    def test_it_is_bounded(self) -> None:
        """Of many servers a few are named, and of many reasons the most frequent ones told."""
        reasons = {f"s{n:03}": f"s{n:03} is down" for n in range(100)}
        self.assertEqual(joined_once(reasons), "s000 is down (s001, s002, s003 and 96 more too)")
        reasons |= {f"t{n}": f"trouble {'x' * n}" for n in range(10)}
        said = joined_once(reasons)
        self.assertTrue(said.startswith("s000"))
        self.assertTrue(said.endswith("; and 8 more"), said)

    def test_room(self) -> None:
        """Full and read-only servers are told from those that have too little."""
        self.assertEqual(servers_full("s", 5, 70), "s has space for 5 bytes, but a share takes 70")
        self.assertIn("read-only", servers_full("s", 0, 70))
