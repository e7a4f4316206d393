"""What a command prints, and in how many pieces."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.console import Console
from pipegrid.errors import PipegridError


class Counted(io.BytesIO):
    """Counts what is handed over, and goes away after so much of it."""

    def __init__(self, most: int = 1 << 30) -> None:
        super().__init__()
        self.flushes = 0
        self._most = most

    def flush(self) -> None:
        """A program that writes to a pipe hands over here."""
        self.flushes += 1
        if len(self.getvalue()) > self._most:
            raise BrokenPipeError


class ConsoleTests(SynchronousTestCase):
    """Results, one by one and many together."""

    def test_what_it_is_about(self) -> None:
        """Is said before the sentence unless that names it; a word in it that looks the same does not."""
        for about, text, said in (
            ("a", "a file does not fit", "a: a file does not fit"),
            ("g", "nothing more is written", "g: nothing more is written"),
            ("a", "cannot read a: Is a directory", "cannot read a: Is a directory"),
            ("d/a", "cannot write /x/d/a: No space", "cannot write /x/d/a: No space"),
            ("f1", "cannot write x/f11: No space", "f1: cannot write x/f11: No space"),
            ("f1", "cannot write x/f1: No space", "cannot write x/f1: No space"),
            ("a.b", "there is no 'a.b'", "there is no 'a.b'"),
            ("a long name", "of a long name it is said", "of a long name it is said"),
            ("", "all of it", "all of it"),
        ):
            stderr = io.StringIO()
            Console(None, None, stderr).complain(PipegridError(text), about)
            self.assertEqual(stderr.getvalue(), f"pipegrid: {said}\n")

    def test_many_are_written_together(self) -> None:
        """Ten thousand lines are a few writes, and the same lines as one by one."""
        rows = [(f"entry{n:05}\x1b", {"n": n}) for n in range(10_000)]
        for as_json in (False, True):
            single, many = Counted(), Counted()
            one, all_of_them = (Console(None, out, io.StringIO()) for out in (single, many))
            one.json = all_of_them.json = as_json
            for row in rows:
                one.result(*row)
            all_of_them.results_of(iter(rows))
            self.assertEqual(many.getvalue(), single.getvalue())
            self.assertEqual(single.flushes, 10_000)
            self.assertLess(many.flushes, 10)
        self.assertEqual(json.loads(many.getvalue().splitlines()[-1]), {"n": 9999})

    def test_nobody_reads(self) -> None:
        """The rest is not even made when the reader has gone away."""
        out = Counted(most=100_000)
        console = Console(None, out, io.StringIO())
        made = [0]

        def rows() -> Iterator[tuple[str, dict[str, Any]]]:
            for number in range(1_000_000):
                made[0] = number
                yield "x" * 99, {}

        self.assertRaises(BrokenPipeError, console.results_of, rows())
        self.assertTrue(console.results.abandoned)
        self.assertLess(made[0], 3000)

    def test_numbers_that_json_has_not(self) -> None:
        """As an entry of a directory may say them: every reader of JSON understands the line."""
        out = io.BytesIO()
        console = Console(None, out, io.StringIO())
        console.json = True
        no, yes = float("nan"), {"c": 1.5, "d": -0.0, "e": None}
        console.result(
            "", {"m": {"a": [float("inf"), -float("inf"), 2, no], "b": (no, "x\x1b"), **yes}}
        )

        def refuse(text: str) -> None:
            self.fail(f"{text} is no JSON")

        found = json.loads(out.getvalue(), parse_constant=refuse)
        self.assertEqual(found, {"m": {"a": [None, None, 2, None], "b": [None, "x\x1b"], **yes}})

    def test_lines_of_json(self) -> None:
        """They are those of ``json``, which is not loaded for plain ones."""
        plain: list[dict[str, Any]] = [{}, {"a": 1}, {"path": "/a b/c'd", "n": -(1 << 70), "e": ""}]
        odd: tuple[Any, ...] = (True, None, 0.5, "ü", '"', "\\", "\n", "\x7f", [], {"b": 1})
        others: list[dict[str, Any]] = [{'"': 1}, *({"a": value} for value in odd)]
        others.append({"n": IntEnum("Status", "ONE").ONE})  # type: ignore[attr-defined]
        for fields in (*plain, *others):
            out = io.BytesIO()
            console = Console(None, out, io.StringIO())
            console.json = True
            console.result("", fields)
            self.assertEqual(json.loads(out.getvalue()), fields)
            said = json.dumps(fields, ensure_ascii=False)
            said = said if said.isprintable() else json.dumps(fields)
            self.assertEqual(out.getvalue().decode(), f"{said}\n")

    def test_nothing(self) -> None:
        """An empty directory prints nothing."""
        out = Counted()
        console = Console(None, out, io.StringIO())
        console.results_of([])
        self.assertEqual((out.getvalue(), out.flushes), (b"", 0))
