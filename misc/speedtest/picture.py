"""
The timeline of one upload as a picture that stands by itself, for the README.

    pipegrid speedtest run --quick --servers 10 --rtt 100ms --only '1x 200B' --output results
    python -m misc.speedtest.picture results/run.json docs/timeline.svg

Its colours follow the reader's, light or dark, as those of the report do.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pipegrid.errors import UsageError
from pipegrid.speedtest.run_results import Run, parse_run

STYLE = """<style>
svg { --paper: #ffffff; --ink: #16202c; --muted: #526070; --line: #dde2e8; --up: #0b62a8; --down: #b8500a;
  --ceiling: #16202c; --sans: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  background: var(--paper); }
@media (prefers-color-scheme: dark) {
  svg { --paper: #12161c; --ink: #eef1f5; --muted: #a9b4c0; --line: #323b47; --up: #6cb8f6; --down: #f5a35c;
    --ceiling: #eef1f5; }
}
* { stroke-linejoin: round; stroke-linecap: butt; }
</style>"""


def picture(run: Run) -> str:
    """
    Return the timeline of a run as an SVG document.

    Raises:
        ValueError: the run has none.
    """
    from pipegrid.speedtest import charts, report_figures

    timeline = run.timeline
    if timeline is None or not timeline.bursts:
        raise ValueError("this run has no timeline; its servers were in process, or out of sight")
    servers = len({burst.server for burst in timeline.bursts})
    label = (
        f"One upload of {timeline.name} to {servers} servers: all of it leaves at once, and it is stored"
        f" after {report_figures.digits(timeline.took_s / timeline.rtt_s)} round trips."
    )
    wide, _ = charts.draw("timeline", label, lambda wide: charts.timeline_chart(run, wide))
    return re.sub(r"(<svg\b[^>]*>)", lambda head: f"{head[1]}\n{STYLE}", wide, count=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument(
        "run", type=Path, help="what 'pipegrid speedtest run --output' wrote: run.json"
    )
    parser.add_argument("svg", type=Path)
    options = parser.parse_args(arguments)
    try:
        text = picture(parse_run(options.run.read_bytes(), str(options.run)))
        options.svg.write_text(text, "utf-8")
    except (OSError, ValueError, UsageError) as error:
        print(f"picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
