"""The attacks run, and what they break would be noticed."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import attrs
from misc import attack
from misc.attack import __main__ as program
from misc.attack.honest import Times
from misc.attack.measure import MAX_LEFT_THREADS, MAX_MORE_BYTES, Outcome, State
from twisted.trial.unittest import SynchronousTestCase

IDLE = State(resident_bytes=50 << 20, sockets=2, files=5, threads=3, incoming=0)
GOOD = Outcome(
    attack=attack.ATTACKS[0],
    idle=IDLE,
    after=IDLE,
    peak_bytes=60 << 20,
    undisturbed=Times([0.01, 0.01, 0.02]),
    disturbed=Times([0.015, 0.015, 0.3]),
)


class TableTests(SynchronousTestCase):
    """The list of attacks."""

    def test_each_has_a_program_and_a_sentence(self) -> None:
        """What is in the table can be run, by a name of its own."""
        names = [each.name for each in attack.ATTACKS]
        self.assertEqual(len(set(names)), len(names))
        for each in attack.ATTACKS:
            self.assertTrue(importlib.util.find_spec(f"misc.attack.{each.module}"), each.name)
            self.assertIn(each.who, (attack.STRANGER, attack.SECRET))
            self.assertGreater(len(each.sentence.split()), 3)

    def test_all_of_them_take_ten_minutes(self) -> None:
        """However many there are, and so that each has enough time to do harm."""
        count = len(attack.ATTACKS)
        seconds = program.default_seconds(count)
        self.assertLessEqual(count * (seconds + program.OVERHEAD_S), program.WHOLE_S)
        self.assertGreaterEqual(seconds, 10.0)

    def test_each_is_documented(self) -> None:
        """The reference names each, in the table of those who can do it."""
        page = (Path(__file__).parents[2] / "docs" / "reference-security.md").read_text("utf-8")
        for each in attack.ATTACKS:
            who = each.who if each.who == "with the secret" else f"by {each.who}"
            table = page.split(f"\n| {who} | what holds it |\n")[1].split("\n\n")[0]
            self.assertRegex(table, rf"(?m)^\| `{each.name}`: .* \| .* \|$")

    def test_the_list(self) -> None:
        """--list says what there is."""
        out = io.StringIO()
        self.assertEqual(program.main(["--list"], out), 0)
        self.assertEqual(len(out.getvalue().splitlines()), len(attack.ATTACKS))


class RunTests(SynchronousTestCase):
    """``make attack`` in small: real processes, two seconds."""

    def test_one_attack(self) -> None:
        """One line of JSON, a table, and nothing left; times are not judged where tests run."""
        out = io.StringIO()
        arguments = ["--only", "slow_bodies", "--seconds", "2", "--untimed"]
        status = program.main(arguments, out)
        lines = out.getvalue().splitlines()
        self.assertEqual(status, 0, out.getvalue())
        result = json.loads(lines[1])
        self.assertEqual((result["attack"], result["broken"]), ("slow_bodies", []))
        self.assertGreater(result["tries"], 0)
        self.assertGreater(result["idle_mib"], 10)
        self.assertGreaterEqual(result["peak_mib"], result["idle_mib"])
        self.assertEqual(lines[-1], "all bounds held")

    def test_an_attack_program_that_fails_is_no_success(self) -> None:
        """A server that nobody attacked has held nothing."""
        wrong = attrs.evolve(attack.ATTACKS[0], module="there_is_no_such")
        self.patch(program, "ATTACKS", (wrong,))
        out = io.StringIO()
        self.assertEqual(program.main(["--seconds", "0.5", "--untimed"], out), 1)
        self.assertIn("the attack program failed", out.getvalue())


class BoundsTests(SynchronousTestCase):
    """What must hold."""

    def test_good(self) -> None:
        """Twice the median, 1 s, 256 MiB, nothing left."""
        self.assertEqual(GOOD.broken(), [])

    def test_each_bound(self) -> None:
        """Each is noticed by itself, and named."""
        for change, word in (
            ({"peak_bytes": (51 << 20) + MAX_MORE_BYTES}, "memory"),
            ({"after": attrs.evolve(IDLE, resident_bytes=150 << 20)}, "of memory stayed"),
            ({"after": attrs.evolve(IDLE, sockets=3)}, "1 connections stayed"),
            ({"after": attrs.evolve(IDLE, threads=4 + MAX_LEFT_THREADS)}, "threads"),
            ({"after": attrs.evolve(IDLE, incoming=1)}, "unfinished"),
            ({"disturbed": Times([0.021, 0.021])}, "2.1 times as long"),
            ({"disturbed": Times([0.01, 0.01, 1.1])}, "once took 1.10 s"),
            ({"alive": False}, "process ended"),
            ({"said": "ImportError"}, "ImportError"),
        ):
            [sentence] = attrs.evolve(GOOD, **change).broken()
            self.assertIn(word, sentence)

    def test_one_refusal_is_too_many(self) -> None:
        """A client that knows the secret is served."""
        broken = attrs.evolve(GOOD, disturbed=Times([0.01], ["ConnectionError: cut"])).broken()
        self.assertIn("refused 1 of 2 times (ConnectionError: cut)", broken[0])

    def test_times_are_judged_only_where_they_mean_something(self) -> None:
        """--untimed leaves the others as they are."""
        slow = attrs.evolve(GOOD, disturbed=Times([5.0], ["refused"]))
        self.assertEqual(slow.broken(timed=False), [])
        slow = attrs.evolve(slow, alive=False)
        self.assertEqual(len(slow.broken(timed=False)), 1)
