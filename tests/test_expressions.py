"""Regular expressions are linear: twice the input takes at most about twice the time, for each of them."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import sre_parse

SOURCE = Path(__file__).resolve().parent.parent / "src"
STEPS = (*range(8, 64, 2), *(64 << power for power in range(9)))
"""By small steps at first: one that is exponential would never end after a large one."""

NOTICED_S = 0.02
_SEARCHES = r"\.(?:search|finditer|findall|sub|split)\("

LOCAL = {"speedtest.charts", "speedtest.buildbot_results", "cli.manpage"}
"""Modules that apply theirs to text of our own, or to results that the caller has on its disk."""


def expressions() -> Iterator[tuple[str, re.Pattern[Any], bool]]:
    """Yield each module's expressions: name, expression, whether it is looked for anywhere in a text."""
    for path in sorted((SOURCE / "pipegrid").rglob("*.py")):
        text = path.read_text()
        if "re.compile(" not in text:
            continue
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if name.removeprefix("pipegrid.") in LOCAL:
            continue
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            found = value
            if callable(value) and key.startswith("_") and hasattr(value, "cache_info"):
                if value.__wrapped__.__code__.co_argcount:
                    continue
                found = value()
            for each in found if isinstance(found, tuple) else (found,):
                if isinstance(each, re.Pattern):
                    yield f"{name}.{key}", each, bool(re.search(rf"\b{key}{_SEARCHES}", text))


def sample(items: Any, optional: bool) -> str:
    """Return some text that an expression matches; with what may be left out, or without."""
    return "".join(_sample(str(op), argument, optional) for op, argument in items)


def _sample(op: str, argument: Any, optional: bool) -> str:
    if op == "LITERAL":
        return chr(argument)
    if op in ("NOT_LITERAL", "IN", "ANY"):
        return _one_of(op, argument)
    if op == "SUBPATTERN":
        return sample(argument[3], optional)
    if op == "ATOMIC_GROUP":
        return sample(argument, optional)
    if op == "BRANCH":
        return sample(argument[1][-1 if optional else 0], optional)
    if "REPEAT" in op:
        least, most, body = argument
        return sample(body, optional) * max(int(least), min(int(optional), int(most)))
    return ""


def _one_of(op: str, argument: Any) -> str:
    if op == "ANY":
        return "a"
    pattern = re.compile("(?s).")
    allowed = [chr(each) for each in range(32, 127)] + ["\n", "\t", "\r", "月"]
    if op == "NOT_LITERAL":
        return next(each for each in "a b" if ord(each) != argument)
    for char in allowed[1:] + allowed[:1]:
        if pattern.match(char) and _is_in(char, argument):
            return char
    return "a"


def _is_in(char: str, items: Any) -> bool:
    negated = found = False
    for op, argument in items:
        name = str(op)
        if name == "NEGATE":
            negated = True
        elif name == "LITERAL":
            found |= ord(char) == argument
        elif name == "RANGE":
            found |= argument[0] <= ord(char) <= argument[1]
        elif name == "CATEGORY":
            kind = str(argument)
            is_kind = {
                "DIGIT": char.isdigit(),
                "SPACE": char.isspace(),
                "WORD": char.isalnum() or char == "_",
            }[kind.rpartition("_")[2]]
            found |= is_kind != ("_NOT_" in kind)
    return found != negated


def pumps(items: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield what comes before each repetition of an expression, and what is repeated, in several forms."""
    for op, argument in items:
        name = str(op)
        if "REPEAT" in name:
            for optional in (False, True):
                body = sample(argument[2], optional)
                if argument[1] > 30 and body:
                    yield prefix, body
            yield from pumps(argument[2], prefix)
        elif name == "SUBPATTERN":
            yield from pumps(argument[3], prefix)
        elif name == "BRANCH":
            for each in argument[1]:
                yield from pumps(each, prefix)
        prefix += _sample(name, argument, False)


def attacks(pattern: re.Pattern[Any]) -> set[tuple[str, str]]:
    """Return pairs of a beginning and of what is to follow it again and again."""
    source = pattern.pattern
    text = source if isinstance(source, str) else source.decode("latin-1")
    parsed = sre_parse.parse(text, pattern.flags & ~re.UNICODE & ~re.ASCII & ~re.LOCALE)
    found = set(pumps(parsed))
    single = {body[:1] for _, body in found} | {" ", "\n", "-", "a", "0", ":", "/"}
    starts = {prefix for prefix, _ in found} | {""}
    return found | {(start, each) for start in starts for each in single}


def seconds(pattern: re.Pattern[Any], text: str, anywhere: bool) -> float:
    """Return how long it takes to see that the text does not match, or where it does."""
    given: Any = text if isinstance(pattern.pattern, str) else text.encode("utf-8")
    best = 9e9
    for _ in range(3):
        begin = process_time()
        pattern.fullmatch(given)
        if anywhere:
            for _match in pattern.finditer(given):
                pass
        best = min(best, process_time() - begin)
        if best < NOTICED_S:
            break
    return best


def slow(pattern: re.Pattern[Any], anywhere: bool) -> str | None:
    """Return an input of which twice as much takes far more than twice as long; None: there is none."""
    for prefix, piece in attacks(pattern):
        last = 0.0
        for pieces in STEPS:
            took = seconds(pattern, prefix + piece * pieces + "\0", anywhere)
            if took > NOTICED_S and took > 3 * max(last, NOTICED_S / 4):
                return f"{prefix!r} and {pieces} times {piece!r}: {took:.3f} s, fewer {last:.3f} s"
            last = took
    return None


class ExpressionTests(SynchronousTestCase):
    """All that this program applies to what comes from elsewhere."""

    def test_doubled(self) -> None:
        """The input of each is doubled again and again, with what its own repetitions match."""
        count = 0
        for name, pattern, anywhere in expressions():
            count += 1
            self.assertIsNone(slow(pattern, anywhere), name)
        self.assertGreater(count, 60)

    def test_the_test(self) -> None:
        """It finds exponential and quadratic ones; that for headers of signatures was of the first kind."""
        for text in (r"A\n(?:[^\n:]+: ?[^\n]*\n)*\nB", r"(?:a|a)*b", r"(?:[a-z]+)*!"):
            self.assertIsNotNone(slow(re.compile(text), False), text)
        self.assertIsNotNone(slow(re.compile(r"\s+x"), True))
        self.assertIsNone(slow(re.compile(r"(?:[^\n:]+:[^\n]*\n)*\nB"), False))
