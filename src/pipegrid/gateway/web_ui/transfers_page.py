"""The pages of transfers: one that lists them, and one for each transfer, with its timeline."""

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
"""For each kind of transfer: the word in the path of its page, and the name that pages show."""

_TONES = {"running": "", "finished": "good", "failed": "bad", "cancelled": "warn"}


@attrs.frozen
class TransferLine:
    """A transfer, as lists of transfers show it."""

    record: TransferRecord

    @property
    def kind(self) -> str:
        """The name of the transfer's kind that pages show."""
        return KIND_NAMES[self.record.kind][1]

    @property
    def name(self) -> str:
        """The transfer's kind and number, for headings and links."""
        return f"{self.kind} {self.record.number}"

    @property
    def url(self) -> str:
        """The path of the transfer's page."""
        return f"/status/{KIND_NAMES[self.record.kind][0]}-{self.record.number}"

    @property
    def percent(self) -> int:
        """How much of the transfer is done, in percent."""
        return round(100 * self.record.fraction)

    @property
    def tone(self) -> str:
        """How the state is shown: ``good``, ``warn``, ``bad``, or empty."""
        return _TONES[self.record.state]

    @property
    def took(self) -> str:
        """The duration as text; empty if the transfer is running, or its beginning was not recorded."""
        seconds = self.record.took_s
        if seconds is None or seconds < 10:
            return shown_millis(seconds)
        return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def transfers_page(records: TransferRecords) -> HttpResponse:
    """Return the page that lists all transfers."""
    values = {
        "title": "Transfers",
        "here": "/status",
        "running": transfer_lines(records.active),
        "recent": transfer_lines(records.recent),
    }
    return render_page("transfers.html", values)


def transfer_lines(records: Iterable[TransferRecord]) -> list[TransferLine]:
    """Return the lines of transfers, in the given order."""
    return [TransferLine(record) for record in records]


def transfer_page(record: TransferRecord) -> HttpResponse:
    """Return the page of one transfer, with its timeline."""
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


# Upload progress at ``/uploads/BATCH``: how much of each upload the servers have acknowledged, for the page
# that sends it.
#
# A browser knows how much it has sent to the gateway, but not how much is stored on the grid. So the page's
# script names each upload with ``?progress=BATCH.NUMBER``, and requests the progress of all uploads of its
# batch together. The name of a batch is random, since any client that knows it can read the progress.

MOST_UPLOADS = 1000
"""Maximum number of uploads whose progress is recorded at once; further uploads are stored without it."""

_NAME = re.compile(r"([A-Za-z0-9_-]{16,64})\.([0-9]{1,9})\Z")


class UploadProgress:
    """The progress of uploads that pages of a gateway watch."""

    def __init__(self) -> None:
        self._uploads: dict[tuple[str, str], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._uploads)

    @contextmanager
    def watched(self, name: str) -> Iterator[Progress | None]:
        """
        Record the progress of an upload until the ``with`` block ends.

        Yields the progress callback for the upload; None if the progress of too many uploads is recorded
        already.

        Args:
            name: ``BATCH.NUMBER``.

        Raises:
            WebError: the name is malformed.
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
        """
        Return the acknowledged fraction, from 0 to 1, of each running upload of a batch, by the upload's
        number.
        """
        return {
            number: done / total if total else 0.0
            for (name, number), (done, total) in self._uploads.items()
            if name == batch
        }


async def answer_uploads(call: ApiRequest) -> HttpResponse:
    """
    Answer ``/uploads/BATCH`` with JSON: the acknowledged fraction of each running upload of the batch, by
    number.
    """
    if call.method != "GET":
        raise method_not_allowed(call, "GET, HEAD")
    if len(call.names) != 2 or not call.names[1]:
        raise WebError(404, "there is nothing here; ask for /uploads/ and the name of a batch")
    uploads: UploadProgress = call.http.site.uploads
    said = json_text(uploads.fractions(call.names[1]))
    headers = {"Cache-Control": "no-store"}
    return HttpResponse(said, content_type="application/json", headers=headers)
