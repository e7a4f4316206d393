"""The pages of transfers: those that run and those that have ended, and one with its timeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from pipegrid.gateway.http_response import HttpResponse, WebError, json_text
from pipegrid.gateway.transfer_records import TransferKind, TransferRecord, TransferRecords
from pipegrid.gateway.web_api.api_request import ApiRequest, method_not_allowed
from pipegrid.gateway.web_api.check_json import storage_index_text
from pipegrid.gateway.web_ui.page_templates import render_page, shown_millis
from pipegrid.gateway.web_ui.transfer_timeline import progress_curve, server_timeline
from pipegrid.transfer.results import Progress

KIND_NAMES: dict[TransferKind, tuple[str, str]] = {
    "upload": ("up", "Upload"),
    "download": ("down", "Download"),
    "publish": ("publish", "Change"),
    "retrieve": ("retrieve", "Read"),
}
"""Of each kind the word in the path of its page, and what people call it."""

_TONES = {"running": "", "finished": "good", "failed": "bad", "cancelled": "warn"}


@attrs.frozen
class TransferLine:
    """A transfer as lists show it."""

    record: TransferRecord

    @property
    def kind(self) -> str:
        """What people call its kind."""
        return KIND_NAMES[self.record.kind][1]

    @property
    def name(self) -> str:
        """Its kind and its number, for headings and links."""
        return f"{self.kind} {self.record.number}"

    @property
    def url(self) -> str:
        """The path of its page."""
        return f"/status/{KIND_NAMES[self.record.kind][0]}-{self.record.number}"

    @property
    def percent(self) -> int:
        """Of it that is done."""
        return round(100 * self.record.fraction)

    @property
    def tone(self) -> str:
        """Of its state: ``good``, ``warn``, ``bad``, or empty."""
        return _TONES[self.record.state]

    @property
    def took(self) -> str:
        """How long, in words; empty: it runs, or its begin was not recorded."""
        seconds = self.record.took_s
        if seconds is None or seconds < 10:
            return shown_millis(seconds)
        return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def transfers_page(records: TransferRecords) -> HttpResponse:
    """Return the page about all transfers."""
    values = {
        "title": "Transfers",
        "here": "/status",
        "running": transfer_lines(records.active),
        "recent": transfer_lines(records.recent),
    }
    return render_page("transfers.html", values)


def transfer_lines(records: Iterable[TransferRecord]) -> list[TransferLine]:
    """Return the lines of transfers, in their order."""
    return [TransferLine(record) for record in records]


def transfer_page(record: TransferRecord) -> HttpResponse:
    """Return the page about one transfer, with its timeline."""
    line = TransferLine(record)
    values: dict[str, Any] = {
        "title": line.name,
        "line": line,
        "index": storage_index_text(record.cap),
        "curve": progress_curve(record.samples, record.size),
        "bursts": server_timeline(record.traffic.servers, record.age_s or 0.0),
        "servers": sorted(record.servers.items()),
        "is_upload": record.kind == "upload",
    }
    return render_page("transfer.html", values)


# How much of each upload the servers have acknowledged, for the page that sends it: ``/uploads/BATCH``.
#
# A browser knows how much it has sent to the gateway, but not how much is on the grid. So the script of
# a page names its uploads, ``?progress=BATCH.NUMBER``, and asks for all of a batch at once. A batch has a
# random name, because each client that knows the name can read the progress.

MOST_UPLOADS = 1000
"""Of all pages, that are watched at a time; others are stored all the same."""

_NAME = re.compile(r"([A-Za-z0-9_-]{16,64})\.([0-9]{1,9})\Z")


class UploadProgress:
    """The uploads of a gateway that pages watch."""

    def __init__(self) -> None:
        self._uploads: dict[tuple[str, str], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._uploads)

    @contextmanager
    def watched(self, name: str) -> Iterator[Progress | None]:
        """
        Watch an upload while the context lasts; gives what its progress is reported to.

        Args:
            name: ``BATCH.NUMBER``.

        Raises:
            WebError: it is no such name.
        """
        found = _NAME.match(name)
        if found is None:
            raise WebError(
                400,
                "progress is BATCH.NUMBER: at least 16 letters and digits, a dot, and a number",
            )
        key = (found[1], found[2])
        if len(self._uploads) >= MOST_UPLOADS:
            yield None
            return

        def report(done: int, total: int) -> None:
            self._uploads[key] = (done, total)

        report(0, 0)
        try:
            yield report
        finally:
            self._uploads.pop(key, None)

    def fractions(self, batch: str) -> dict[str, float]:
        """Return which part of each upload of a batch is acknowledged, from 0 to 1, by its number."""
        return {
            number: done / total if total else 0.0
            for (name, number), (done, total) in self._uploads.items()
            if name == batch
        }


async def answer_uploads(call: ApiRequest) -> HttpResponse:
    """Answer ``/uploads/BATCH`` with JSON: the acknowledged part of each upload of it, by its number."""
    if call.method != "GET":
        raise method_not_allowed(call, "GET, HEAD")
    if len(call.names) != 2 or not call.names[1]:
        raise WebError(404, "there is nothing here; ask for /uploads/ and the name of a batch")
    uploads: UploadProgress = call.http.site.uploads
    said = json_text(uploads.fractions(call.names[1]))
    headers = {"Cache-Control": "no-store"}
    return HttpResponse(said, content_type="application/json", headers=headers)
