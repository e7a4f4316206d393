"""The options of ``backup`` and ``forget`` that say which runs are kept."""

from __future__ import annotations

from typing import Any

import click

from pipegrid.cli.options import as_one
from pipegrid.errors import UsageError
from pipegrid.tree.backup import retention

_PERIODS = {
    "hourly": "hours",
    "daily": "days",
    "weekly": "weeks",
    "monthly": "months",
    "yearly": "years",
}
_MOST = click.IntRange(1, 1_000_000)


class DurationType(click.ParamType[str]):
    """The click type of ``--keep-within``: a duration, which is checked and returned as text."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text if it is a duration; fail otherwise."""
        try:
            retention.parse_duration(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def rules_of(rules: dict[str, Any]) -> retention.Retention:
    """Return the retention rules for the given options."""
    within = rules["keep_within"]
    return retention.Retention(
        rules["keep_last"],
        tags=frozenset(rules["keep_tag"]),
        within=None if within is None else retention.parse_duration(within),
        **{each: rules[f"keep_{each}"] for each in _PERIODS},
    )


retention_options = as_one(
    "rules",
    dict,
    click.option(
        "--keep-tag",
        multiple=True,
        metavar="TAG",
        help="Keep runs with this tag; may be given again.",
    ),
    click.option(
        "--keep-within",
        type=DurationType(),
        metavar="DURATION",
        help="Keep runs that are at most this much older than the newest one: 12h, 30d, 2w, 6m, 1y6m.",
    ),
    *(
        click.option(
            f"--keep-{each}",
            type=_MOST,
            metavar="N",
            help=f"Keep the newest run of each of N {plural}.",
        )
        for each, plural in reversed(_PERIODS.items())
    ),
    click.option(
        "--keep-last",
        type=_MOST,
        metavar="N",
        help="Of each backup of this machine, keep the newest N runs and those that other rules keep; forget "
        "all others.",
    ),
)
"""The options that say which runs are kept; ``rules_of`` takes their values."""
