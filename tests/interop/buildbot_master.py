"""
The build step on a real Buildbot master and worker, with the configuration that ``misc/buildbot`` offers.

Not part of ``make test``: ``make buildbot`` installs Buildbot and a browser, and runs this. What is measured
is made up (``buildbot_program``), so that builds take a moment, and become slower when they are told to.
"""

from __future__ import annotations

import atexit
import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from twisted.internet import reactor
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.speedtest.run_results import parse_run
from tests.browser import Page, browser
from tests.interop.buildbot_processes import ROOT, Buildbot, program
from tests.speedtest.test_buildresults import make_run

SUCCESS, FAILURE = 0, 2
BUILDER = "speedtest-installed"
SCREENSHOTS = ROOT / "speedtest-results"


@cache
def _running() -> tuple[Buildbot, Path]:
    """Return the master that all tests share, and its directory; both last as long as this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    scratch = Path(stack.enter_context(TemporaryDirectory(prefix="pipegrid-buildbot-")))
    speedtest = program("tests.interop.buildbot_program", str(scratch / "script.json"))
    return stack.enter_context(Buildbot(scratch, speedtest)), scratch


class BuildbotCase(SynchronousTestCase):
    """Builds of a master that all tests share; each test begins a history of its own."""

    timeout = 600

    def setUp(self) -> None:
        self.buildbot, self.scratch = _running()
        self.script = self.scratch / "script.json"

    def say(self, mode: str = "good", **more: Any) -> None:
        """Tell the program what to do in the next builds."""
        self.script.write_text(json.dumps({"mode": mode, **more}), "utf-8")

    def build(self, mode: str = "good", accept: bool = False, **more: Any) -> dict[str, Any]:
        """Have the program do something in a forced build; returns the finished build."""
        self.say(mode, **more)
        return self.buildbot.build(BUILDER, accept=accept)

    def step(self, build: dict[str, Any]) -> dict[str, Any]:
        """Return the step of a build that measures."""
        steps = self.buildbot.get(f"builds/{build['buildid']}/steps")["steps"]
        [found] = [step for step in steps if step["name"] == "speedtest"]
        assert isinstance(found, dict)
        return found

    def log(self, build: dict[str, Any], name: str) -> str:
        """Return a log of the step that measures."""
        logs = self.buildbot.get(f"steps/{self.step(build)['stepid']}/logs")["logs"]
        [number] = [log["logid"] for log in logs if log["name"] == name]
        return self.buildbot.raw(f"logs/{number}/raw_inline").decode()


class BuildbotTests(BuildbotCase):
    """``pipegrid.buildbot.SpeedTest``, as the REST interface shows it."""

    def test_a_prefix_that_buildbot_cannot_find(self) -> None:
        """Is refused when the configuration is read; the second build would fail for it."""
        from buildbot.config import ConfigErrors
        from buildbot.util.pathmatch import ident

        from pipegrid.buildbot import DATA_NAME, SpeedTest

        with self.assertRaises(ConfigErrors) as caught:
            SpeedTest(prefix="10 servers ")
        self.assertIn("'10 servers '", str(caught.exception.errors))
        self.assertRaises(TypeError, ident, "10 servers " + DATA_NAME)
        SpeedTest(prefix="ten-servers.")
        ident("ten-servers." + DATA_NAME)

    def test_properties(self) -> None:
        """The figures of the lines are the build's properties, and the summary tells the most of them."""
        build = self.build(accept=True, seed=5)
        self.assertEqual(build["results"], SUCCESS, build)
        properties = self.buildbot.properties(build)
        run = make_run(5)
        expected = {
            "upload-per-file": run.find("10x 200B", "up"),
            "download-per-file": run.find("10x 200B", "down"),
        }
        for name, measured in expected.items():
            assert measured is not None
            self.assertEqual(properties[name], round(measured.per_file_s, 3))
            self.assertEqual(properties[f"{name}-RTT"], round(measured.per_file_s / 0.01, 6))
        for name, way in (("upload-1MB", "up"), ("download-1MB", "down")):
            large = run.find("1MB", way)
            assert large is not None
            self.assertEqual(properties[name], round(large.bytes_per_s / 1000, 2))
            self.assertEqual(properties[f"{name}-of-TCP"], 90.1)
        self.assertEqual(properties["speedtest-commit"], run.commit)
        self.assertIs(properties["speedtest-regressed"], False)
        self.assertRegex(build["state_string"], r"upload \S+ \S?s a file \(\S+ RTT\), 1MB at ")

    def test_results_logs_and_data(self) -> None:
        """Test results, report, JSON and comparison are kept with the build."""
        build = self.build(accept=True, seed=6)
        place = f"builds/{build['buildid']}"
        sets = self.buildbot.get(f"{place}/test_result_sets")["test_result_sets"]
        self.assertEqual({each["value_unit"] for each in sets}, {"s", "B/s", "RTT"})
        self.assertTrue(all(each["complete"] for each in sets))
        [seconds] = [each for each in sets if each["value_unit"] == "s"]
        where = f"test_result_sets/{seconds['test_result_setid']}/results"
        results = {
            each["test_name"]: float(each["value"])
            for each in self.buildbot.get(where)["test_results"]
        }
        self.assertEqual(len(results), 4)
        measured = make_run(6).find("10x 200B", "up")
        assert measured is not None
        self.assertEqual(results["10x 200B up"], float(f"{measured.per_file_s:.6g}"))

        kept = self.buildbot.raw(f"{place}/data/pipegrid-speedtest/value")
        self.assertEqual(parse_run(kept, "build data"), make_run(6))
        step = self.step(build)["stepid"]
        logs = {log["name"]: log for log in self.buildbot.get(f"steps/{step}/logs")["logs"]}
        self.assertLessEqual({"stdio", "report", "run.json", "comparison"}, set(logs))
        self.assertEqual(logs["report"]["type"], "h")
        text = self.log(build, "run.json")
        self.assertEqual(parse_run(text[text.index("{") :], "log"), make_run(6))
        page = self.log(build, "report")
        self.assertIn("&lt;h1&gt;Report of a speed test&lt;/h1&gt;", page)

    def test_regressions(self) -> None:
        """
        A slower build fails, and so does the next one; accepted, it is the measure from then on.
        """
        self.assertEqual(self.build(accept=True, seed=11)["results"], SUCCESS)
        for seed in (12, 13, 14):
            build = self.build(seed=seed)
            self.assertEqual(build["results"], SUCCESS, build)
        self.assertIn("no change compared with 3 builds", build["state_string"])
        for seed in (15, 16):
            build = self.build(seed=seed, factor=1.5)
            self.assertEqual(build["results"], FAILURE, build)
            self.assertRegex(
                build["state_string"], r"slower compared with 4 builds: 1MB up \+\d\d %"
            )
            self.assertIs(self.buildbot.properties(build)["speedtest-regressed"], True)
        build = self.build(seed=17, factor=1.5, accept=True)
        self.assertEqual(build["results"], SUCCESS, build)
        self.assertIn("accepted", build["state_string"])
        before = build["number"] - 1
        build = self.build(seed=18, factor=1.5)
        self.assertEqual(build["results"], SUCCESS, build)
        self.assertIn("no change compared with 1 build", build["state_string"])
        lines = self.log(build, "stdio")
        self.assertRegex(
            lines, rf"history: (build-\d+\.json )*build-0*{before}\.json build-\d+\.json\n"
        )

    def test_bad_runs(self) -> None:
        """Whatever goes wrong is a failure with a sentence, and leaves no figures."""
        for mode, sentence in (
            ("fails", "exit status 1: pipegrid: the grid at 127.0.0.1 does not answer; start it"),
            ("empty", "the speed test wrote no speedtest-results/run.json"),
            ("silent", "printed no line for upload-per-file and download-per-file"),
            ("strange", "speedtest-results/run.json is of version 99 of the results"),
        ):
            build = self.build(mode)
            self.assertEqual(build["results"], FAILURE, build)
            self.assertIn(sentence, self.step(build)["state_string"])
            self.assertIn(sentence, build["state_string"])
            self.assertNotIn("upload-per-file", self.buildbot.properties(build))

    def test_the_real_one(self) -> None:
        """What ``pipegrid speedtest`` prints and writes is what the step reads; its report is whole."""
        build = self.build("real", accept=True)
        self.assertEqual(build["results"], SUCCESS, build)
        properties = self.buildbot.properties(build)
        for direction in ("upload", "download"):
            self.assertGreater(properties[f"{direction}-per-file"], 0)
            self.assertGreater(properties[f"{direction}-per-file-RTT"], 0)
        kept = self.buildbot.raw(f"builds/{build['buildid']}/data/pipegrid-speedtest/value")
        self.assertTrue(parse_run(kept, "build data").measurements)
        report = self.log(build, "report")
        self.assertIn("&lt;svg", report)
        self.assertTrue(report.rstrip().endswith("</iframe>"), report[-200:])
        self.assertIn("&lt;/html&gt;", report)

    def test_followed_live(self) -> None:
        """What was measured last is in the step's summary while the test goes on."""
        go_on = self.scratch / "go on"
        self.say(wait=str(go_on), seed=2)
        number = self.buildbot.force(BUILDER, accept=True)

        def told() -> bool:
            steps = self.buildbot.get(f"builds/{number}/steps")["steps"]
            return any("round 1 of 5: 1MB" in step["state_string"] for step in steps)

        try:
            self.buildbot.wait("progress", told)
            [build] = self.buildbot.get(f"builds/{number}")["builds"]
            self.assertFalse(build["complete"])
        finally:
            go_on.touch()
        self.assertEqual(self.buildbot.finished(number)["results"], SUCCESS)


class PageTests(BuildbotCase, TestCase):
    """What a person sees, in a real browser."""

    async def test_page(self) -> None:
        """The build's page shows figures and verdict; the report is on a page of its own, in a frame."""
        build = self.build(accept=True, seed=21)
        url = f"{self.buildbot.url}#/builders/{build['builderid']}/builds/{build['number']}"
        async with browser(reactor) as page:
            await page.show(url)
            text = await self.appears(page, "document.body.innerText", "build successful")
            self.assertRegex(text, r"upload \S+ \S?s a file \(\S+ RTT\), 1MB at \S+ [kM]B/s")
            for word in (BUILDER, "SUCCESS", "speedtest"):
                self.assertIn(word, text)
            await self.picture(page, "buildbot.png")
            await page.show("about:blank")  # another fragment alone would load nothing anew
            await page.show(f"{url}/steps/{self.step(build)['number']}/logs/report")
            frame = "document.querySelector('iframe')?.srcdoc ?? ''"
            report = await self.appears(page, frame, "</h1>")
            self.assertIn("<h1>Report of a speed test</h1>", report)
            colour = await page.evaluate("getComputedStyle(document.body).color")
            self.assertNotEqual(
                colour, "rgb(1, 2, 3)", "the report's style reached the master's page"
            )
            await self.picture(page, "buildbot-report.png")

    async def appears(self, page: Page, script: str, text: str) -> str:
        """Wait until an expression holds a text, and return its value then."""
        look = f"""new Promise(resolve => {{
            const look = () => {{
                const value = {script};
                value.includes({json.dumps(text)}) ? resolve(value) : setTimeout(look, 100);
            }};
            look();
        }})"""
        return str(await page.evaluate(look))

    async def picture(self, page: Page, name: str) -> None:
        """Keep a picture of the page, which must show something."""
        drawn = await page.screenshot()
        SCREENSHOTS.mkdir(exist_ok=True)
        drawn.save(SCREENSHOTS / name)
        colours = drawn.getcolors(maxcolors=1 << 24)
        self.assertGreater(len(colours or ()), 50, "a blank page has fewer colours")
