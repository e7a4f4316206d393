"""
How much of each upload the servers have acknowledged, for the page that sends it: ``/uploads/BATCH``.

A browser knows how much it has sent to the gateway, which says nothing of the grid. So the script of a page
names its uploads, ``?progress=BATCH.NUMBER``, and asks for all of a batch at once. A batch has a random name,
since who knows it reads how far the uploads are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipegrid.gateway.http_response import HttpResponse, json_text
from pipegrid.gateway.web_api.api_request import ApiRequest, method_not_allowed
from pipegrid.gateway.web_api.web_errors import WebError
from pipegrid.transfer.results import Progress

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
