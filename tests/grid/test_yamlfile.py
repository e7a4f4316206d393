"""YAML files of the user's: libyaml and PyYAML say the same of them, and neither is overwhelmed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import yaml
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.grid.strict_config import MAX_DEPTH, parse_yaml

SERVERS = b"""
storage:
  v0-abc:
    ann: {nickname: "\xc3\xa9mile", anonymous-storage-NURLs: [one, two]}
  v0-def:
    ann: &same
      nickname: 7
      since: 2020-01-01
  v0-ghi:
    ann: *same
  v0-jkl:
    ann:
      <<: *same
      nickname: yes
"""


class ParseTests(SynchronousTestCase):
    """``parse_yaml``, with libyaml."""

    def parse(self, data: bytes) -> Any:
        """Return what a file with these bytes says."""
        return parse_yaml(data, "servers.yaml")

    def refusal(self, data: bytes) -> str:
        """Return why such a file is refused."""
        return str(self.assertRaises(UsageError, self.parse, data))

    def test_what_it_says(self) -> None:
        """All that YAML has for safe values, aliases and merge keys too, as PyYAML's own loader reads it."""
        windows = b"\xef\xbb\xbf" + SERVERS.replace(b"\n", b"\r\n")
        for data in (
            SERVERS,
            windows,
            b"",
            b"- x\n- [1, 2.5, null, ~]",
        ):
            self.assertEqual(self.parse(data), yaml.safe_load(data))

    def test_nothing_is_made(self) -> None:
        """Tags that would make objects of Python are refused."""
        self.assertIn(
            "could not determine a constructor",
            self.refusal(b"storage: !!python/object/apply:os.getcwd []"),
        )

    def test_no_yaml(self) -> None:
        """The file is named, and what to do."""
        for data in (b"storage: [", b"storage:\n\tx: y", b"a: *unknown"):
            refusal = self.refusal(data)
            self.assertTrue(refusal.startswith("cannot understand servers.yaml: "), refusal)
            self.assertTrue(refusal.endswith("; correct it by hand"), refusal)

    def test_too_deep(self) -> None:
        """However a file is nested, it is refused; libyaml itself would end the process."""
        deep = 100_000
        for data in (
            b"[" * deep,
            b"{a: " * deep,
            b"- " * deep,
            b"? " * deep,
            b"".join(b" " * level + b"a:\n" for level in range(2000)),
            b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        ):
            refusal = self.refusal(data)
            self.assertRegex(refusal, "deep|depth|recursion", data[:8])

    def test_many_servers_are_not_deep(self) -> None:
        """Brackets side by side are no depth, and what is as deep as may be is read."""
        self.parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
        many = 6000
        self.assertEqual(self.parse(b"[" + b"[], " * many + b"]"), [[]] * many)

    def test_aliases_stand_for_too_much(self) -> None:
        """A kilobyte that would become more than there is memory for, as soon as it is printed."""
        lists = "a0: &a0 [x, x]\n" + "".join(
            f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)
        )
        for bomb in (lists, "a: &a [*a]", "a: &a {b: {c: *a}}"):
            self.assertIn("its aliases stand for more than", self.refusal(bomb.encode()), bomb[:20])

    def test_merge_keys_double(self) -> None:
        """Sixty lines that would be 2^60 keys: refused, or merged key by key, as PyYAML does since 6.0.4."""
        bomb = "a0: &a0 {x: y}\n" + "".join(
            f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)
        )
        try:
            said = self.parse(bomb.encode())
        except UsageError as error:
            self.assertIn("its aliases stand for more than", str(error))
        else:
            self.assertEqual(said, {f"a{n}": {"x": "y"} for n in range(60)})


class PureTests(ParseTests):
    """The same where PyYAML was built without libyaml."""

    def parse(self, data: bytes) -> Any:
        with mock.patch.object(yaml, "CSafeLoader", yaml.SafeLoader):
            return super().parse(data)

    def test_without_the_name(self) -> None:
        """Then it has no such loader at all."""
        with mock.patch.object(yaml, "CSafeLoader"):
            del yaml.CSafeLoader
            self.assertEqual(super().parse(b"a: [b]"), {"a": ["b"]})


class LibyamlTests(SynchronousTestCase):
    """Who reads."""

    def test_libyaml_is_used(self) -> None:
        """Where it is there, PyYAML's own scanner, eight times as slow, reads nothing."""
        with mock.patch.object(yaml.SafeLoader, "__init__", side_effect=AssertionError):
            self.assertEqual(len(parse_yaml(SERVERS, "servers.yaml")["storage"]), 4)
