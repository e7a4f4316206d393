"""
Print the oldest version of each dependency that ``setup.cfg`` permits, as pip's constraints.

``make lowest`` installs just these and runs the tests, so that a bound is raised when the code needs
more. Nothing else says what the bounds are.

    python -m misc.lowest [EXTRA ...] > constraints.txt
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

SETUP = Path(__file__).parent.parent / "setup.cfg"
_REQUIREMENT = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])? *>= *([0-9][0-9a-z.]*)(?:, *< *[0-9.]+)?"
)


def lowest(requirements: Iterable[str]) -> Iterator[str]:
    """
    Yield a constraint for each requirement ``name >= version``, perhaps with ``, < version`` behind it.

    A name alone has no bound, and none is yielded.

    Raises:
        ValueError: a requirement of another form, of which nobody could tell which version is its oldest.
    """
    for requirement in requirements:
        if re.fullmatch(r"[A-Za-z0-9._-]+", requirement):
            continue
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement!r} is not of the form 'name >= version'")
        yield f"{match[1]}=={match[2]}"


def requirements(extras: Sequence[str], path: Path = SETUP) -> list[str]:
    """
    Return what the project needs, and what it needs for some extras, a line each.

    Raises:
        KeyError: there is no such extra.
    """
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(path)
    found = setup["options"]["install_requires"].split("\n")
    for extra in extras:
        found += setup["options.extras_require"][extra].split("\n")
    return list(dict.fromkeys(line.strip() for line in found if line.strip()))


if __name__ == "__main__":
    print("\n".join(lowest(requirements(sys.argv[1:]))))
