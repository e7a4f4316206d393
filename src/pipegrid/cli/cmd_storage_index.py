"""``pipegrid storage-index``: what servers call a file."""

from __future__ import annotations

from typing import Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import OfflineJob
from pipegrid.cli.options import CapArguments, cap_arguments, common_options
from pipegrid.cli.outcome import ExitStatus, one_status


@click.command(name="storage-index")
@cap_arguments
@common_options
def command(caps: CapArguments) -> OfflineJob:
    """
    Print the storage indexes of files, by which servers name their shares.

    On a server's disk the shares are in shares/XX/INDEX, where XX are the first two characters of
    INDEX. With it alone a file can neither be read nor checked. No grid is needed. Caps of
    directories, of what can change, and verifier caps will do as well. A file that is in its cap has no
    storage index: its line is '-'.
    """

    def work(console: Console) -> int:
        from pipegrid.cli.files import check_path, identity, named_files, storage_index_text
        from pipegrid.core.caps import LitCap, MutableCap, keepable
        from pipegrid.errors import CapError

        files = named_files(console, *caps, keepable)
        statuses: set[ExitStatus] = set()
        for file in files:
            try:
                check_path(file)
            except CapError as error:
                if len(files) == 1:
                    raise
                statuses.add(console.failed(error, file.label, identity(file), True))
                continue
            index = storage_index_text(file.cap) or None
            coded = None if isinstance(file.cap, (LitCap, MutableCap)) else file.cap
            fields: dict[str, Any] = {
                **identity(file),
                "storage_index": index,
                "size": None if isinstance(file.cap, MutableCap) else file.cap.size,
                "required_shares": None if coded is None else coded.required_shares,
                "total_shares": None if coded is None else coded.total_shares,
            }
            console.result(index or "-", fields)
        return one_status(statuses)

    return OfflineJob(work)
