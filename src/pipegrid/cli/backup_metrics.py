"""Metrics of backups, in a file for Prometheus's node exporter (``--metrics-file``)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import read_file

SUFFIX = ".prom"
"""The end of the file's name; the node exporter reads no other files."""

METRICS = {
    "last_run_timestamp_seconds": "When the last run ended, in seconds since 1970.",
    "last_success_timestamp_seconds": "When the last run with exit status 0 ended, in seconds since 1970.",
    "exit_status": "The exit status of the last run.",
    "duration_seconds": "How long the last run took.",
    "files": "Files in the last run that was stored.",
    "bytes": "Bytes of these files.",
    "sent_bytes": "Bytes of the files that were sent.",
    "left_out": "Files and directories that could not be stored.",
}
"""The names of the metrics, without ``PREFIX``, and their help texts."""

PREFIX = "pipegrid_backup_"
MAX_BYTES = 1 << 20
MAX_NAMES = 1000
"""How many backups may have metrics in one file; the others, which reported earlier, are dropped."""

_MODE = 0o644
"""The file's permissions; the node exporter runs as another user."""

Values = dict[str, float]


def write_metrics(path: Path, name: str, values: Values) -> None:
    """
    Put the metrics of one backup into a file, atomically.

    The file keeps the metrics of other backups, and the metrics of this backup that are not in ``values``. A
    symbolic link is replaced by a file, and its target stays as it is.

    Args:
        values: new metrics of this backup, by their names in ``METRICS``.

    Raises:
        OSError: the file cannot be written.
    """
    name = name.encode("utf-8", "backslashreplace").decode()  # the name may not be UTF-8
    backups = _read(path)
    backups[name] = {**backups.pop(name, {}), **values}
    registry = CollectorRegistry()
    for metric, text in METRICS.items():
        gauge = Gauge(f"{PREFIX}{metric}", text, ["name"], registry=registry)
        for each in list(backups)[-MAX_NAMES:]:
            if metric in backups[each]:
                gauge.labels(each).set(backups[each][metric])
    replace_file(path, generate_latest(registry), mode=_MODE)


def _read(path: Path) -> dict[str, Values]:
    """Return the metrics in a file, by the names of backups; malformed and unknown metrics are dropped."""
    backups: dict[str, Values] = {}
    with suppress(OSError, ValueError):
        data = read_file(path, MAX_BYTES + 1)
        if len(data) <= MAX_BYTES:
            for family in text_string_to_metric_families(data.decode("utf-8")):
                metric = family.name.removeprefix(PREFIX)
                if metric not in METRICS or not family.name.startswith(PREFIX):
                    continue
                for sample in family.samples:
                    backups.setdefault(sample.labels.get("name", ""), {})[metric] = sample.value
    return backups
