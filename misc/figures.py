"""
Promises with their measured figures: ``docs/figures.json``, and the tables that are made from it.

    python -m misc.figures --write                       bring the tables in docs/ up to date
    python -m misc.figures --record MODULE [OPTION...]   run a command of misc/, and append what it measures
    python -m misc.figures --add ID FIGURE KEPT          append a figure that was read by a person

A figure has the commit and the date of its measurement, and options that were given; the pages show the
latest of each promise, with its date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "figures.json"
PAGES = ("reference-speed", "reference-quality", "reference-security", "reference-durability")
VERDICTS = ("yes", "barely", "no", "not measured")
"""*barely*: the median keeps the promise, and single rounds do not."""

BEGIN, END = "<!-- made by misc.figures -->\n", "<!-- end of what misc.figures made -->\n"
_HEAD = """\
Commands of `misc` or `twisted` are run with `python -m`.

| promise | command | latest figure, day | kept |
|---|---|---|---|
"""


@attrs.frozen
class Figure:
    """
    What one run gave.

    Attributes:
        kept: one of ``VERDICTS``.
        commit: the version that was measured, or in which the figure was first written down.
        date: ISO, of the day.
    """

    figure: str
    kept: str
    commit: str
    date: str


@attrs.frozen
class Promise:
    """
    A sentence, the command that measures it, and all figures, the latest last.

    Attributes:
        name: unique.
        page: one of ``PAGES``.
        command: as it is typed.
        reads: how ``--record`` finds the figure in what a command prints: ``module``, and either ``status``,
            the words for a command that ends with status 0, or ``match`` (fields of a line of JSON and their
            values), ``median``, ``low`` and ``high`` (dotted names of fields), ``unit``, and ``at_most`` or
            ``at_least``; ``json``: the module prints such lines with ``--json``. None: by ``--add`` only.
    """

    name: str
    page: str
    promise: str
    command: str
    figures: tuple[Figure, ...] = ()
    reads: Mapping[str, Any] | None = None

    def row(self) -> str:
        """Return the promise's line of its page's table."""
        last = self.figures[-1] if self.figures else Figure("", "not measured", "", "")
        kept = f"**{last.kept}**" if last.kept in ("no", "not measured") else last.kept
        cells = (
            self.promise,
            f"`{self.command.removeprefix('python -m ')}`",
            f"{last.figure}, {last.date}" if last.date else last.figure,
            kept,
        )
        return "| " + " | ".join(cells) + " |\n"


def load(file: Path = FILE) -> list[Promise]:
    """
    Read all promises.

    Raises:
        ValueError: a page or a verdict is unknown, or two promises have one name.
    """
    promises = [
        Promise(**{**each, "figures": tuple(Figure(**figure) for figure in each["figures"])})
        for each in json.loads(file.read_text("utf-8"))
    ]
    for each in promises:
        if each.page not in PAGES or any(one.kept not in VERDICTS for one in each.figures):
            raise ValueError(f"{each.name}: unknown page or verdict")
    if len({each.name for each in promises}) != len(promises):
        raise ValueError("two promises have one name")
    return promises


def save(promises: Sequence[Promise], file: Path = FILE) -> None:
    """Write all promises, each figure on a line of its own."""
    text = json.dumps([attrs.asdict(each) for each in promises], indent=1, ensure_ascii=False)
    text = re.sub(
        r"\{\s+(\"figure\": [^{}]+?)\s+\}",
        lambda found: "{" + re.sub(r"\n\s+", " ", found[1]) + "}",
        text,
    )
    file.write_text(text + "\n", "utf-8")


def page(text: str, name: str, promises: Sequence[Promise]) -> str:
    """
    Return a page's text with its table brought up to date.

    Raises:
        ValueError: the page has no place for it.
    """
    before, found, rest = text.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not (found and ends):
        raise ValueError(f"{name}: there is no place for the table")
    rows = "".join(each.row() for each in promises if each.page == name)
    return f"{before}{BEGIN}\n{_HEAD}{rows}\n{END}{after}"


def write(promises: Sequence[Promise], docs: Path) -> None:
    """Bring the tables of all pages up to date."""
    for name in PAGES:
        path = docs / f"{name}.md"
        path.write_text(page(path.read_text("utf-8"), name, promises), "utf-8")


def add(promises: Sequence[Promise], name: str, figure: str, kept: str) -> list[Promise]:
    """
    Append a figure, measured now with the version that is checked out (``+``: and with changes).

    Raises:
        ValueError: there is no such promise.
    """
    if name not in {each.name for each in promises}:
        raise ValueError(f"there is no promise {name!r}")
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    new = Figure(figure, kept, commit.stdout.strip(), today)
    return [
        attrs.evolve(each, figures=(*each.figures, new)) if each.name == name else each
        for each in promises
    ]


def field(line: Any, dotted: str) -> Any:
    """Return the value under a dotted name; numbers in it are places of a list."""
    for part in dotted.split("."):
        line = line[int(part)] if isinstance(line, list) else line[part]
    return line


def judge(line: Mapping[str, Any], reads: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the figure in a line of JSON and whether it keeps its promise; None if it is of another one."""
    if any(line.get(name) != value for name, value in reads.get("match", {}).items()):
        return None
    try:
        median = field(line, reads["median"])
        spread = [field(line, reads[name]) for name in ("low", "high") if name in reads]
    except (KeyError, IndexError, TypeError):
        return None
    most, least = reads.get("at_most", float("inf")), reads.get("at_least", float("-inf"))
    kept = "yes" if all(least <= each <= most for each in spread) else "barely"
    rounds = f" ({spread[0]:g} to {spread[1]:g})" if len(spread) == 2 else ""
    return f"{median:g}{rounds} {reads['unit']}", kept if least <= median <= most else "no"


def record(
    promises: Sequence[Promise], module: str, arguments: Sequence[str], out: TextIO
) -> list[Promise]:
    """Run a module of misc/, pass on what it prints, and return the promises with what it measured."""
    reading = [each.reads for each in promises if each.reads is not None]
    asked = any(each.get("json") for each in reading if each["module"] == module)
    options = ["--json"] if asked and "--json" not in arguments else []
    command = [sys.executable, "-m", module, *arguments, *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            out.write(line)
            lines.append(line)
    found = list(promises)
    for each in promises:
        if each.reads is None or each.reads["module"] != module:
            continue
        for figure, kept in _found(each.reads, lines, process.returncode, arguments):
            found = add(found, each.name, figure, kept)
    return found


def _found(
    reads: Mapping[str, Any], lines: Sequence[str], status: int, arguments: Sequence[str]
) -> Iterator[tuple[str, str]]:
    given = [each for each in arguments if each != "--json"]
    how = f" `{' '.join(given)}`" if given else ""
    if "status" in reads:
        if status in (0, 1):  # others: it could not be tried
            words = reads["status"] if status == 0 else "not held: status 1"
            yield f"{words}{how}", "yes" if status == 0 else "no"
        return
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        judged = judge(value, reads) if isinstance(value, dict) else None
        if judged is not None:
            yield f"{judged[0]}{how}", judged[1]


def main(
    arguments: Sequence[str] | None = None, out: TextIO = sys.stdout, file: Path = FILE
) -> int:
    """Do what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m misc.figures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true")
    choice.add_argument("--record", nargs=argparse.REMAINDER, metavar="MODULE")
    choice.add_argument("--add", nargs=3, metavar=("ID", "FIGURE", "KEPT"))
    options = parser.parse_args(arguments)
    before = promises = load(file)
    if options.record is not None:
        if not options.record:
            parser.error("--record needs a module, such as misc.speedtest.cold")
        promises = record(promises, options.record[0], options.record[1:], out)
    elif options.add:
        name, figure, kept = options.add
        if kept not in VERDICTS:
            parser.error(f"KEPT is one of {', '.join(VERDICTS)}")
        try:
            promises = add(promises, name, figure, kept)
        except ValueError as error:
            parser.error(str(error))
    for old, new in zip(before, promises, strict=True):
        for each in new.figures[len(old.figures) :]:
            print(f"{new.name}: {each.figure}; kept: {each.kept}", file=out)
    if promises != before:
        save(promises, file)
    write(promises, file.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
