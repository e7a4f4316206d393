"""Which Python ``make`` takes for its environments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

SCRIPT = Path(__file__).parent.parent / "misc" / "fastest-python.sh"
ANSWER = "#!/bin/sh\necho %s\n"


class FastestPythonTests(SynchronousTestCase):
    """``misc/fastest-python.sh``, with Pythons that say how fast they are."""

    def choose(self, first: str, system: str | None) -> str:
        """Return the name of the one it takes, of two that run scripts."""
        directory = Path(self.mktemp())
        (directory / "bin").mkdir(parents=True)
        for name, text in (("bin/python3", first), ("system", system)):
            if text is not None:
                (directory / name).write_text(text)
                (directory / name).chmod(0o755)
        done = subprocess.run(
            ["sh", str(SCRIPT)],
            env={
                "PATH": f"{directory.absolute() / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
                "SYSTEM_PYTHON": str(directory.absolute() / "system"),
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        self.assertEqual(done.stderr, "")
        return Path(done.stdout.strip()).name

    def test_a_little_faster_is_not_enough(self) -> None:
        """The caller's own is taken where that costs less than a fifth."""
        self.assertEqual(self.choose(ANSWER % 100, ANSWER % 81), "python3")

    def test_much_faster(self) -> None:
        """The system's is taken where the caller's is slow."""
        self.assertEqual(self.choose(ANSWER % 100, ANSWER % 60), "system")

    def test_one_that_will_not_do(self) -> None:
        """Too old, or without what makes environments: it says nothing, and is not taken."""
        broken = "#!/bin/sh\necho 'no module named venv' >&2; exit 1\n"
        self.assertEqual(self.choose(broken, ANSWER % 100), "system")
        self.assertEqual(self.choose(ANSWER % 100, broken), "python3")
        self.assertEqual(self.choose(ANSWER % 100, None), "python3")
        self.assertEqual(
            self.choose(broken, broken), "python3"
        )  # whose own words say what is wrong

    def test_for_real(self) -> None:
        """It gives one that runs, and is new enough."""
        # Each of trial's processes has the path of its own Python there, which another one cannot use.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def said(*command: str) -> str:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, timeout=60
            )
            return done.stdout

        program = "import sys, venv; print(sys.version_info >= (3, 10))"
        self.assertEqual(said(said("sh", str(SCRIPT)).strip(), "-c", program), "True\n")
