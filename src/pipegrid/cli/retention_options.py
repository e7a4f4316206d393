"""The options that say which runs are kept, of ``backup`` and ``forget``."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipegrid.errors import UsageError
from pipegrid.tree.backup import retention

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipegrid.tree.backup.retention import Retention

F = TypeVar("F")

_PERIODS = {
    "hourly": "hours",
    "daily": "days",
    "weekly": "weeks",
    "monthly": "months",
    "yearly": "years",
}
_MOST = click.IntRange(1, 1_000_000)


class DurationType(click.ParamType[str]):
    """A duration as ``--keep-within`` takes it, checked and returned as text."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, if it is a duration."""
        try:
            retention.parse_duration(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def retention_options(function: F) -> Callable[..., Any]:
    """Add the options; the command gets them as ``rules``, a dictionary for ``rules_of``."""

    @wraps(function)  # type: ignore[arg-type]
    def gather(*arguments: Any, **given: Any) -> Any:
        rules = {name: given.pop(name) for name in list(given) if name.startswith("keep_")}
        return function(*arguments, **given, rules=rules)  # type: ignore[operator]

    decorated: Callable[..., Any] = gather
    for option in reversed(_options()):
        decorated = option(decorated)
    return decorated


def rules_of(rules: dict[str, Any]) -> Retention:
    """Return the rules that were given."""
    within = rules["keep_within"]
    return retention.Retention(
        rules["keep_last"],
        tags=frozenset(rules["keep_tag"]),
        within=None if within is None else retention.parse_duration(within),
        **{each: rules[f"keep_{each}"] for each in _PERIODS},
    )


def _options() -> list[Callable[[Any], Any]]:
    last = click.option(
        "--keep-last",
        type=_MOST,
        metavar="N",
        help="Of each backup of this machine, keep the newest N runs and those that other rules keep; forget "
        "all others.",
    )
    periods = [
        click.option(
            f"--keep-{each}",
            type=_MOST,
            metavar="N",
            help=f"Keep the newest run of each of N {plural}.",
        )
        for each, plural in _PERIODS.items()
    ]
    within = click.option(
        "--keep-within",
        type=DurationType(),
        metavar="DURATION",
        help="Keep runs that are at most this much older than the newest one: 12h, 30d, 2w, 6m, 1y6m.",
    )
    tag = click.option(
        "--keep-tag",
        multiple=True,
        metavar="TAG",
        help="Keep runs with this tag; may be given again.",
    )
    return [last, *periods, within, tag]
