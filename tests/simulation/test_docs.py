"""What the explanation shows, works."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PAGE = Path(__file__).parent.parent.parent / "docs" / "explanation-simulation.md"


class ExplanationTests(SynchronousTestCase):
    """The page about the simulation."""

    def test_the_first_run(self) -> None:
        """The example runs, and prints the one round trip that it promises."""
        (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {})
        self.assertEqual(printed.getvalue(), "1.0\n")
