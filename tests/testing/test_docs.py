"""The page about testing programs shows tests that pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import TestResult

from twisted.trial.runner import TestLoader
from twisted.trial.unittest import SynchronousTestCase

PAGE = Path(__file__).parents[2] / "docs/how-to-test-programs.md"


class HowToTests(SynchronousTestCase):
    """The example."""

    def test_the_example(self) -> None:
        """All of its tests pass."""
        (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
        names: dict[str, Any] = {"__name__": "example"}
        exec(code, names)
        result = TestResult()
        TestLoader().loadClass(names["ArchiveTests"]).run(result)
        self.assertEqual((result.testsRun, result.failures, result.errors), (3, [], []))
