"""Docstrings and comments use none of the words that the glossary replaces."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

CHECKED = (
    "*.py",
    "core",
    "flow",
    "disk",
    "gateway/*.py",
    "gateway/restic",
    "gateway/sftp",
    "gateway/web_api",
    "tree",
    "wire",
    "storage",
    "server",
    "reactor",
    "testing",
    "speedtest",
    "grid",
    "transfer",
    "transport",
    "http11",
    "mirror",
    "cli",
)
"""Packages whose prose has been revised. Add a package after revising it."""

MOST_MODULE_LINES = 8
"""A module docstring is one or two sentences, and perhaps a source."""

LONG_MODULE_DOCSTRINGS = {"buildbot.py"}
"""Pages of the user's documentation."""

INSTEAD = {
    r"nobody|somebody|anybody": "no client, no server, another process",
    r"whoever": "the caller, a client that",
    r"anew": "again, from scratch",
    r"besides?": "next to, in addition to",
    r"errands?": "job",
    r"patien(t|ce|tly)": "time limit",
    r"strangers?": "unauthenticated client, untrusted input",
    r"in vain": "wasted, without effect",
    r"in one (go|breath|move)": "in one request, at the same time",
    r"(let|lets|letting) go": "release, drop",
    r"(is|are|was|were) told": "gets, receives",
    r"tells? of|told of": "report, describe",
    r"under way|on (its|their) way": "running, pending, in flight",
    r"elsewhere": "on other servers",
    r"ow(e|es|ed)": "outstanding, unanswered",
    r"goodbye|farewell|last words": "close, shut down",
    r"second (try|tries)|tried once more": "retry",
    r"look(s|ed)? after": "check, maintain",
    r"book(s|ed)": "count, record",
    r"h[eo]ld(s|ing)? (it |them )?up": "delay, block",
    r"pass(es|ed)? over": "skip",
    r"of (before|old)(?![\w ])": "stale, previous, existing",
    r"mend(s|ed|ing)?": "fix, correct",
    r"becom?es? of|became of|comes? of": "outcome of, what happens to",
    r"cut off|broken off": "interrupted",
    r"signs? of life|last sign": "last activity",
    r"doubt(s|ful|ed)?": "uncertain",
    r"favou?rites?": "primary",
    r"(is|are|was|were) to be": "must be, will be",
    r"(may|can|could) stand|st(ands|ood) (in|behind|before)": "is listed in, is stored in",
    r"behind": "after, following",
    r"head start": "in advance",
    r"rooms?": "space, capacity, slot",
    r"sprint|entrants?": "epoll driver",
    r"believ(e|es|ed)": "trust, accept",
    r"plainly": "simply",
    r"so (much|many|long) (is|are|of|as)|(for|in|of) so (much|many|long)": "N, that many",
    r"who (has|wants|had|asks)": "the caller, a client that",
    r"waves?": "batch of queries",
    r"in words": "as text",
}

_UNWANTED = re.compile(rf"(?i)\b(?:{'|'.join(f'(?:{each})' for each in INSTEAD)})\b")


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each docstring, of attributes as well, and of each comment."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value
    comments: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if comments and comments[-1][1] == token.start[0] - 1:
                first, _, before = comments.pop()
                comments.append((first, token.start[0], f"{before} {text}"))
            else:
                comments.append((token.start[0], token.start[0], text))
    for first, _, text in comments:
        yield first, text


def unwanted(source: str) -> Iterator[str]:
    """Yield the line and the word for each word of docstrings and comments that has a better one."""
    for line, text in prose(source):
        joined = " ".join(re.sub(r"``[^`]*``", "``", text).split())
        for found in _UNWANTED.finditer(joined):
            word = found.group()
            say = next(say for each, say in INSTEAD.items() if re.fullmatch(f"(?i){each}", word))
            yield f"line {line}: '{word}': say: {say}"


def checked_modules() -> list[Path]:
    """Return the modules of the packages in ``CHECKED``."""
    found: list[Path] = []
    for each in CHECKED:
        found += PACKAGE.glob(each) if "*" in each else (PACKAGE / each).rglob("*.py")
    return sorted(found)


class ProseTests(SynchronousTestCase):
    """Docstrings and comments in the words of the field."""

    def test_unwanted_words(self) -> None:
        """Words with a better one do not occur in revised packages."""
        found = {
            path.relative_to(PACKAGE).as_posix(): words
            for path in checked_modules()
            if (words := list(unwanted(path.read_text("utf-8"))))
        }
        self.assertEqual(found, {}, "use the word that is given")

    def test_module_docstrings_are_short(self) -> None:
        """Details belong into the docstrings of classes and functions."""
        found = {}
        for path in checked_modules():
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            lines = len(text.splitlines())
            if lines > MOST_MODULE_LINES and path.name not in LONG_MODULE_DOCSTRINGS:
                found[path.relative_to(PACKAGE).as_posix()] = lines
        self.assertEqual(found, {}, f"at most {MOST_MODULE_LINES} lines")

    def test_every_package_exists(self) -> None:
        """A renamed package stays in the list."""
        for each in CHECKED:
            self.assertTrue("*" in each or (PACKAGE / each).is_dir(), each)

    def test_words_are_found(self) -> None:
        """In docstrings of modules, classes, functions and attributes, and in comments, across lines."""
        source = (
            '"""Begin\nanew."""\n'
            "class A:\n"
            '    """Nobody knows."""\n'
            "    x = 1\n"
            '    """So many of them; a ``room`` is a name."""\n'
            "    def b(self):\n"
            "        pass  # what is under\n"
            "        # way\n"
            "text = 'whoever'\n"
        )
        self.assertEqual(
            sorted(unwanted(source)),
            [
                "line 1: 'anew': say: again, from scratch",
                "line 4: 'Nobody': say: no client, no server, another process",
                "line 6: 'So many of': say: N, that many",
                "line 8: 'under way': say: running, pending, in flight",
            ],
        )
