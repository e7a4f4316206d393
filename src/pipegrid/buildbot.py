"""
``SpeedTest``, a Buildbot step that measures storage throughput and fails builds that make it slower.

    from pipegrid.buildbot import SpeedTest

    factory.addStep(SpeedTest(compare_with=10, on_regression="warn"))

The step runs ``pipegrid speedtest run`` on the worker and shows each result as it arrives. At the end it
sets:

* properties: ``upload-per-file`` (seconds), ``upload-per-file-RTT``, ``upload-1MB``, ``upload-10MB``,
  ``upload-100MB`` (kB a second), ...; the same for ``download``; all of them also as statistics of the step;
* sets of test results (seconds, bytes a second, round trips) with one result for each measurement;
* logs: ``report`` (HTML), ``run.json`` (every sample), ``comparison``;
* a verdict: whether anything is slower, beyond noise, than in this builder's last builds on this worker.

The history is kept as *build data*: the JSON of each run is stored with its build in the master's database.
So all masters share the history, it survives workers that are created for each build, and the master deletes
a run together with its build. A run can be fetched from ``/api/v2/builds/N/data/pipegrid-speedtest/value``.

``pipegrid.speedtest.buildbot_results`` makes the verdict, without Buildbot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from buildbot import config
from buildbot.data.resultspec import Filter
from buildbot.process.buildstep import BuildStep, ShellMixin
from buildbot.process.logobserver import LogLineObserver
from buildbot.process.results import CANCELLED, FAILURE, SUCCESS, WARNINGS
from buildbot.steps.worker import CompositeStepMixin
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from pipegrid.errors import UsageError
from pipegrid.speedtest.buildbot_results import (
    EarlierBuilds,
    Follower,
    framed,
    judge,
    last_words,
    prefix_problem,
    result_sets,
)
from pipegrid.speedtest.run_results import Run, parse_run

DATA_NAME = "pipegrid-speedtest"
REGRESSED = "speedtest-regressed"
ACCEPTED = "speedtest-accepted"

ON_REGRESSION = {"fail": FAILURE, "warn": WARNINGS, "ignore": SUCCESS}
LOOK_BACK_BUILDS = 100
"""How many earlier builds are searched for runs, at most."""
HISTORY_RUNS = 20
"""How many earlier runs the worker gets, at most, to draw in its report."""

_SOURCE = "SpeedTest"
_LAST_LINES = 20


class SpeedTest(ShellMixin, CompositeStepMixin, BuildStep):  # type: ignore[misc]
    """
    Run the speed test and compare it with earlier builds.

    Args:
        command: the command to run on the worker. It must print the classic lines and write ``run.json``, and
            optionally ``report.html``, into ``output``; the builder's earlier runs are in ``output``'s
            directory ``history``.
        output: a directory below the step's working directory; emptied first.
        compare_with: how many earlier runs to compare with, at most; 0 for none.
        on_regression: the step's result if anything is slower: ``fail``, ``warn`` or ``ignore``.
        accept: if true, a regression becomes the new baseline; best set by a property of a forced build.
        prefix: the beginning of the names of properties and build data; letters, digits, ``_``, ``-`` and
            ``.``, not starting with a digit or dot.
        kwargs: arguments of ``ShellCommand``.
    """

    name = "speedtest"
    description = "measuring"
    renderables = ("output", "accept")

    def __init__(
        self,
        *,
        output: Any = "speedtest-results",
        compare_with: int = 10,
        on_regression: str = "fail",
        accept: Any = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        if on_regression not in ON_REGRESSION:
            config.error(f"SpeedTest: on_regression must be one of {', '.join(ON_REGRESSION)}")
        if not isinstance(compare_with, int) or isinstance(compare_with, bool) or compare_with < 0:
            config.error("SpeedTest: compare_with must be a number of builds, 0 or more")
        if (problem := prefix_problem(prefix)) is not None:
            config.error(f"SpeedTest: prefix {problem}")
        kwargs.setdefault("command", ["pipegrid", "speedtest", "run", "--output", output])
        super().__init__(**self.setupShellMixin(kwargs))
        self.output = output
        self.compare_with = compare_with
        self.on_regression = on_regression
        self.accept = accept
        self.prefix = prefix
        self._follower = Follower()
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._outcome = ""
        self.addLogObserver("stdio", _Lines(self._heard))

    def run(self) -> Deferred[int]:
        """Start the step; return a Deferred that fires with the step's result."""
        return Deferred.fromCoroutine(self._run())

    def getCurrentSummary(self) -> dict[str, str]:
        """Return the latest measurement, as the summary of the running step."""
        return {"step": self._follower.last or "measuring"}

    def getResultSummary(self) -> dict[str, str]:
        """Return the main figures and the verdict, as the summary of the step and the build."""
        if not self._outcome:
            return dict(super().getResultSummary())
        return {"step": self._outcome, "build": self._outcome}

    def _heard(self, line: str) -> None:
        self._said.append(line)
        if self._follower.line(line):
            self.updateSummary()

    async def _run(self) -> int:
        path = self.build.path_module.join
        # Otherwise results of an earlier build could be mistaken for those of this build.
        await self.runRmdir(path(self.workdir, self.output), abandonOnFailure=False)
        earlier = await self._look_back()
        await self._hand_over(earlier)
        self._said.clear()
        command = await self.makeRemoteShellCommand()
        await self.runCommand(command)
        if self.stopped:
            return int(CANCELLED)
        if command.didFail():
            return self._failed(f"the speed test failed: {self._reason(command)}")
        document = await self.getFileContentFromWorker(path(self.output, "run.json"))
        if document is None:
            return self._failed(f"the speed test wrote no {self.output}/run.json")
        try:
            run = parse_run(document, f"{self.output}/run.json")
        except UsageError as error:
            return self._failed(str(error))
        if missing := self._follower.missing():
            return self._failed(f"the speed test printed no line for {' and '.join(missing)}")
        await self._publish(run, _as_bytes(document))
        return await self._judge(run, earlier)

    def _failed(self, sentence: str) -> int:
        self._outcome = sentence
        return int(FAILURE)

    def _reason(self, command: Any) -> str:
        status = "" if command.rc is None else f"exit status {command.rc}"
        if self.timed_out:
            status = "timed out"
        return ": ".join(filter(None, (status, last_words(self._said))))

    async def _publish(self, run: Run, document: bytes) -> None:
        for name, value in self._follower.figures.items():
            self.setProperty(self.prefix + name, value, _SOURCE)
            self.setStatistic(self.prefix + name, value)
        if run.commit is not None:
            self.setProperty(f"{self.prefix}speedtest-commit", run.commit, _SOURCE)
        await self.setBuildData(self.prefix + DATA_NAME, document, _SOURCE)
        for each in result_sets(run):
            setid = await self.addTestResultSet(
                self.prefix + each.description, each.category, each.unit
            )
            for name, value in each.results:
                self.addTestResult(setid, f"{value:.6g}", test_name=name)
        await self.addCompleteLog("run.json", document)
        report = await self.getFileContentFromWorker(
            self.build.path_module.join(self.output, "report.html")
        )
        if report is not None:
            await self.addHTMLLog("report", framed(_as_bytes(report).decode("utf-8", "replace")))

    async def _judge(self, run: Run, earlier: Sequence[EarlierBuild]) -> int:
        baseline = EarlierBuilds(run, self.compare_with)
        for each in earlier:
            baseline.offer(each.document, each.regressed, each.accepted)
        reactor = self.master.reactor
        verdict = await deferToThreadPool(
            reactor, reactor.getThreadPool(), judge, run, baseline.runs, baseline.unlike
        )
        await self.addCompleteLog("comparison", verdict.text)
        accepted = bool(self.accept)
        self.setProperty(self.prefix + REGRESSED, verdict.regressed, _SOURCE)
        self.setProperty(self.prefix + ACCEPTED, accepted, _SOURCE)
        sentences = [self._follower.summary(), verdict.sentence]
        if verdict.regressed and accepted:
            sentences.append("accepted")
        self._outcome = "; ".join(filter(None, sentences))
        if verdict.regressed and not accepted:
            return int(ON_REGRESSION[self.on_regression])
        return int(SUCCESS)

    async def _look_back(self) -> list[EarlierBuild]:
        """Return the runs of this builder's earlier builds on this worker, latest first."""
        data = self.master.data
        builds = await data.get(
            ("builders", await self.build.getBuilderId(), "builds"),
            filters=[
                Filter("complete", "eq", [True]),
                Filter("number", "lt", [self.build.number]),
                Filter("workerid", "eq", [self.worker.workerid]),
            ],
            order=["-number"],
            limit=LOOK_BACK_BUILDS,
        )
        found: list[EarlierBuild] = []
        for build in builds:
            if len(found) >= max(HISTORY_RUNS, self.compare_with):
                break
            place = ("builds", build["buildid"])
            kept = await data.get((*place, "data", self.prefix + DATA_NAME, "value"))
            if kept is None:
                continue
            properties = await data.get((*place, "properties"))
            regressed, accepted = (
                bool(properties.get(self.prefix + name, (False,))[0])
                for name in (REGRESSED, ACCEPTED)
            )
            found.append(EarlierBuild(build["number"], kept["raw"], regressed, accepted))
        return found

    async def _hand_over(self, earlier: Sequence[EarlierBuild]) -> None:
        """Upload the earlier runs to the directory where the speed test looks for them."""
        if not earlier:
            return
        path = self.build.path_module.join
        history = path(self.output, "history")
        await self.runMkdir(path(self.workdir, history), abandonOnFailure=True)
        for each in earlier[:HISTORY_RUNS]:
            await self.downloadFileContentToWorker(
                path(history, f"build-{each.number:09}.json"),
                each.document.decode("utf-8"),
                abandonOnFailure=True,
            )


@attrs.frozen
class EarlierBuild:
    """
    The stored data of an earlier build.

    Attributes:
        number: the number of the build.
        document: the JSON of its run.
        regressed: whether anything was slower in the build than before.
        accepted: whether its regression was accepted as the new baseline.
    """

    number: int
    document: bytes
    regressed: bool
    accepted: bool


class _Lines(LogLineObserver):  # type: ignore[misc]
    """
    Passes each line of standard output and of standard error, where the progress is shown, to a callback.
    """

    def __init__(self, heard: Callable[[str], None]) -> None:
        super().__init__()
        self._heard = heard

    def outLineReceived(self, line: str) -> None:
        self._heard(line)

    def errLineReceived(self, line: str) -> None:
        self._heard(line)


def _as_bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content
