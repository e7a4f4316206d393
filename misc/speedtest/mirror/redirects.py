"""What redirects cost: a host that redirects everything to another, and one that does so file by file."""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from misc.speedtest.mirror.archive import Archive
from misc.speedtest.mirror.bench import Bench
from misc.speedtest.mirror.runs import Run, ratio, summed_up
from misc.speedtest.mirror.tools import PIPEGRID, TOOLS
from misc.speedtest.mirror.webserver import Behaviour

TARGETS = {"for each host": 1.1, "for each file": 1.5}


def redirects(bench: Bench, archive: Archive, rtt_ms: float) -> None:
    """
    Clone an archive directly, and from servers that have none of it and redirect, in turns.

    The server with the files, and those that redirect, are each behind a link with the same round trip.
    """
    own = next(each for each in TOOLS if each.name == PIPEGRID)
    tools = [own] if bench.beside is None else [own, bench.beside]
    with ExitStack() as stack:
        served = stack.enter_context(bench.server(archive.root, Behaviour(strips=".redirected")))
        (there,) = stack.enter_context(bench.behind_link([served], rtt_ms))
        urls = {"directly": f"http://{there}/"}
        for kind, location in (
            ("for each host", f"http://{there}$request_uri"),
            # A place that says nothing of where other files are.
            ("for each file", f"http://{there}$request_uri.redirected"),
        ):
            server = stack.enter_context(
                bench.server(bench.place(), Behaviour(redirects_to=location))
            )
            (address,) = stack.enter_context(bench.behind_link([server], rtt_ms))
            urls[kind] = f"http://{address}/"
        found: dict[str, dict[str, list[Run]]] = {
            tool.name: {kind: [] for kind in urls} for tool in tools
        }
        for number in range(bench.rounds + (not bench.tiny)):
            for kind, url in urls.items():
                for tool in tools:
                    taken = bench.fetch(tool, [url], archive)
                    if number or bench.tiny:
                        found[tool.name][kind].append(taken)
    for name, runs in found.items():
        _tell(bench, archive, rtt_ms, "" if name == own.name else f"; {name}", runs)


def _tell(
    bench: Bench, archive: Archive, rtt_ms: float, what: str, found: dict[str, list[Run]]
) -> None:
    direct = found.pop("directly")
    bench.tell(
        f"redirects: {len(archive.packages)} files, {archive.size_bytes / 1e6:.0f} MB, {rtt_ms:g} ms{what}",
        directly=summed_up(direct),
        **{kind: summed_up(runs) for kind, runs in found.items()},
        ratios={kind: round(ratio(runs, direct), 3) for kind, runs in found.items()},
        # Each run beside the one without redirects of the same round, as other work slows both.
        ratios_by_rounds={
            kind: round(
                statistics.median(
                    one.seconds / other.seconds for one, other in zip(runs, direct, strict=True)
                ),
                3,
            )
            for kind, runs in found.items()
        },
        targets=TARGETS,
    )
