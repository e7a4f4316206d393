"""The results of a run, their JSON form, and facts about the package and the machine that were measured."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

import pipegrid
from pipegrid.core import erasure
from pipegrid.errors import UsageError

# Every sample is stored. Medians and spreads are written only for readers of the file; parsing computes them
# again from the samples. Units: seconds, bytes, bytes per second. ``wire_bytes`` counts bytes of shares that
# have to pass the link: for an upload size * n/k (and hash trees), for a download k shares, without the bytes
# that hedged requests waste.

FORMAT = "pipegrid-speedtest"
VERSION = 1

UP = "up"
DOWN = "down"
DIRECTIONS = (UP, DOWN)

SCENARIO = "scenario"
WINDOW = "window"
ENCODING = "encoding"
COLD_START = "cold start"
GROUPS = (SCENARIO, WINDOW, ENCODING, COLD_START)

T = TypeVar("T")


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@attrs.frozen
class Spread:
    """
    The median of some samples, and their spread.

    Attributes:
        median, minimum, maximum: of the samples.
        deviation: the standard deviation; 0 for a single sample.
        count: how many samples.
    """

    median: float
    minimum: float
    maximum: float
    deviation: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Return the median and the spread of at least one sample."""
    return Spread(
        statistics.median(samples),
        min(samples),
        max(samples),
        statistics.stdev(samples) if len(samples) > 1 else 0.0,
        len(samples),
    )


@attrs.frozen
class EmulatedLink:
    """
    An emulated link.

    Attributes:
        name: the name of the profile, or ``custom``.
        rtt_s: the round-trip time.
        up_bytes_per_s, down_bytes_per_s: the rates; None for unlimited.
    """

    name: str
    rtt_s: float
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


@attrs.frozen
class Parameters:
    """
    What was measured, and how.

    Attributes:
        target: ``private grid``, ``grid``, ``gateway``, or ``baseline`` for the self-check.
        transport: ``gbs``, ``foolscap``, ``gateway`` or ``tcp``.
        servers: how many servers.
        window: the window of the pipelines: ``auto``, or bytes as a decimal number.
        link: the emulated link; None for the unchanged network.
        seed: of the random contents.
    """

    target: str
    transport: str
    servers: int
    required_shares: int
    happy: int
    total_shares: int
    rounds: int
    seed: int
    window: str = "auto"
    durability: str | None = None
    link: EmulatedLink | None = None


@attrs.frozen
class RoundTrip:
    """Round-trip times of one server, measured by tiny exchanges; at least one sample."""

    server: str
    samples_s: tuple[float, ...] = attrs.field(converter=_floats)

    @property
    def minimum_s(self) -> float:
        """The shortest round trip that was measured."""
        return min(self.samples_s)

    @property
    def average_s(self) -> float:
        """The mean of the samples."""
        return statistics.fmean(self.samples_s)


@attrs.frozen
class Baseline:
    """
    What raw streams carry on the path of the scenarios.

    Attributes:
        streams: how many streams at the same time.
        tls: whether they were encrypted.
        direction: ``up`` is away from the client.
        before, after: bytes per second of all streams together, measured before and after the scenarios.
    """

    streams: int
    tls: bool
    direction: str
    before: tuple[float, ...] = attrs.field(converter=_floats, default=())
    after: tuple[float, ...] = attrs.field(converter=_floats, default=())

    @property
    def samples(self) -> tuple[float, ...]:
        """All samples, in bytes a second."""
        return self.before + self.after


@attrs.frozen
class Measurement:
    """
    One scenario in one direction.

    Attributes:
        name: ``startup``, ``10x 200B``, ``1MB``, ...; unique within group, direction and parameters.
        group: ``scenario``, ``window`` (sweep), ``encoding`` (sweep of k/n) or ``cold start``.
        direction: ``up`` or ``down``.
        files, file_bytes: number and size of the files; ``file_bytes`` is the mean if sizes are mixed.
        wire_bytes: bytes of shares that have to pass the link; 0 where this does not apply.
        at_once: whether the files were transferred at the same time, not one after the other.
        samples_s: the seconds for all files of a round, for each round.
        window_bytes: the window, in the window sweep; None is ``auto``.
        required_shares, total_shares: the encoding, in the encoding sweep.
    """

    name: str
    group: str
    direction: str
    files: int
    file_bytes: int
    wire_bytes: int
    samples_s: tuple[float, ...] = attrs.field(converter=_floats)
    at_once: bool = False
    window_bytes: int | None = None
    required_shares: int | None = None
    total_shares: int | None = None

    @property
    def median_s(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples_s)

    @property
    def per_file_s(self) -> float:
        """Median time of a round, divided by the number of files."""
        return self.median_s / self.files

    @property
    def bytes_per_s(self) -> float:
        """Plaintext bytes per second, computed from the median."""
        return self.files * self.file_bytes / self.median_s

    @property
    def wire_bytes_per_s(self) -> float:
        """Bytes of shares per second, computed from the median."""
        return self.wire_bytes / self.median_s


@attrs.frozen
class Burst:
    """Bytes exchanged with one server at one moment of the timeline."""

    server: str
    at_s: float
    direction: str
    size_bytes: int


@attrs.frozen
class Timeline:
    """
    One upload, as seen on the wire.

    Attributes:
        name: of the stored file, such as ``1x 200B``.
        rtt_s: the mean round trip of the servers.
        took_s: seconds from the call to the acknowledgement.
        bursts: in the order of time; at most some thousands.
        samples: from how many uploads this one, with the median time, was chosen.
    """

    name: str
    rtt_s: float
    took_s: float
    bursts: tuple[Burst, ...]
    samples: int = 1


@attrs.frozen(kw_only=True)
class Run:
    """
    One run of the speed test.

    Attributes:
        when: the start, in UTC, such as ``2026-11-21T10:00:00Z``.
        took_s: the duration of the whole run.
        commit: of the measured working copy; None if the package is not in one.
        versions: of pipegrid, python, and libraries that matter.
        machine: system, architecture, cores, memory, as strings.
    """

    when: str
    took_s: float
    commit: str | None
    versions: dict[str, str]
    machine: dict[str, str]
    parameters: Parameters
    round_trips: tuple[RoundTrip, ...]
    baselines: tuple[Baseline, ...]
    measurements: tuple[Measurement, ...]
    timeline: Timeline | None = None

    @property
    def average_rtt_s(self) -> float | None:
        """The mean round trip over all servers; None if unknown."""
        if not self.round_trips:
            return None
        return statistics.fmean(each.average_s for each in self.round_trips)

    @property
    def total_rtt_s(self) -> float | None:
        """The sum of the servers' mean round trips; None if unknown."""
        if not self.round_trips:
            return None
        return sum(each.average_s for each in self.round_trips)

    def baseline(self, direction: str, streams: int, tls: bool) -> float | None:
        """
        Return the median throughput of these raw streams, in bytes per second; None if they were not
        measured.
        """
        for each in self.baselines:
            if (each.direction, each.streams, each.tls) == (direction, streams, tls):
                return statistics.median(each.samples) if each.samples else None
        return None

    def find(self, name: str, direction: str, group: str = SCENARIO) -> Measurement | None:
        """Return a measurement by name, or None if it does not exist."""
        for each in self.measurements:
            if (each.name, each.direction, each.group) == (name, direction, group):
                return each
        return None

    def as_json(self) -> str:
        """Return the run as one JSON object, with the samples and their medians and spreads."""
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION, **attrs.asdict(self)}
        for each in [*document["measurements"], *document["round_trips"]]:
            each["seconds"] = attrs.asdict(spread(each["samples_s"]))
        for each in document["baselines"]:
            if samples := [*each["before"], *each["after"]]:
                each["bytes_per_s"] = attrs.asdict(spread(samples))
        return json.dumps(document, indent=1) + "\n"


def parse_run(text: str | bytes, name: str) -> Run:
    """
    Parse the JSON of a run.

    Args:
        name: the name of the file, for messages.

    Raises:
        UsageError: the text is not JSON, not a run, a run of another version, or damaged.
    """
    try:
        document = json.loads(text)
    except ValueError:
        raise UsageError(f"{name} is not JSON; give a file that the speed test wrote") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{name} holds no results of the speed test; give a file that it wrote")
    if document.get("version") != VERSION:
        raise UsageError(
            f"{name} is of version {document.get('version')!r} of the results, and this program reads"
            f" version {VERSION}; measure again, or use the program that wrote it"
        )
    try:
        return _run(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{name} is damaged ({type(error).__name__}: {error}); measure again"
        ) from None


def _run(document: dict[str, Any]) -> Run:
    parameters = dict(document["parameters"])
    link = parameters.get("link")
    parameters["link"] = None if link is None else _of(EmulatedLink, link)
    timeline = document.get("timeline")
    if timeline is not None:
        bursts = tuple(_of(Burst, each) for each in timeline["bursts"])
        timeline = _of(Timeline, {**timeline, "bursts": bursts})
    measurements = tuple(_of(Measurement, each) for each in document["measurements"])
    round_trips = tuple(_of(RoundTrip, each) for each in document["round_trips"])
    sampled = [each.samples_s for each in measurements] + [each.samples_s for each in round_trips]
    if not all(sampled):
        raise ValueError("a measurement without samples")
    return Run(
        when=str(document["when"]),
        took_s=float(document["took_s"]),
        commit=document.get("commit"),
        versions=dict(document["versions"]),
        machine=dict(document["machine"]),
        parameters=_of(Parameters, parameters),
        round_trips=round_trips,
        baselines=tuple(_of(Baseline, each) for each in document["baselines"]),
        measurements=measurements,
        timeline=timeline,
    )


def _of(kind: type[T], values: dict[str, Any]) -> T:
    """Make an object from the known values, and ignore others, since later versions may write more."""
    known = {field.name for field in attrs.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})


# Facts about the measured package and the machine: commit, versions, machine.

_LIBRARIES = ("Twisted", "cryptography", "pycryptodome", "zfec", "httptools", "foolscap")


def commit() -> str | None:
    """
    Return the commit of this package's working copy, followed by ``+`` if files were changed; None if the
    package is not in a working copy, or git fails.
    """
    here = Path(pipegrid.__file__).resolve().parent
    root = here.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of pipegrid, python, and libraries that matter."""
    found = {"pipegrid": pipegrid.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name.lower()] = importlib.metadata.version(name)
    return found


def machine() -> dict[str, str]:
    """Return the properties of the machine that affect figures."""
    found = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cores": str(os.cpu_count() or "?"),
        "erasure": erasure.library(),
    }
    with contextlib.suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory"] = f"{memory / 2**30:.1f} GiB"
    return found
