"""
The mutable files of a grid: checks the arguments of ``Grid``'s methods and runs them with
``transfer.mutable``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from pipegrid.argument_checks import check_callable, check_kind, check_whole, shown
from pipegrid.core.caps import MutableCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import Buffer
from pipegrid.core.mutable.versions import Format
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import CapError, UsageError
from pipegrid.grid.client_config import GridConfig
from pipegrid.grid.server_readiness import Readiness
from pipegrid.reactor.deferreds import Wakeup
from pipegrid.transfer.get.sink import SinkLike, open_sink
from pipegrid.transfer.mutable.base_version_search import Redo
from pipegrid.transfer.mutable.modify import ContentEdit
from pipegrid.transfer.mutable.mutable_files import (
    ContentOfKey,
    MutableFiles,
    RangeOfVersion,
    ReadResult,
)
from pipegrid.transfer.mutable.publish import CreateResult, WriteResult
from pipegrid.transfer.mutable.retrieve import Retrieve
from pipegrid.transfer.mutable.version_cache import VersionCache, recall
from pipegrid.transfer.mutable.write_queue import Merge
from pipegrid.transfer.peers import TransferContext
from pipegrid.transfer.put.source import Source, SourceLike, open_source
from pipegrid.transfer.put.source_opening import open_for_put
from pipegrid.transfer.results import CheckResult, GetResult, Progress, RenewResult, RepairResult
from pipegrid.transfer.settings import MutableSettings

KNOWN_NAME = "mutable-files"
"""The file that records the newest seen version of each mutable file, in the first cache directory."""

_FORMATS = {"sdmf": Format.SDMF, "mdmf": Format.MDMF}


class Mutables:
    """
    The operations of a grid on mutable files.

    Args:
        means: the servers, workers and limits that all transfers of the grid share.
        silence_s: a server that sends nothing for this time has failed.
    """

    def __init__(
        self,
        means: TransferContext,
        config: GridConfig,
        readiness: Readiness,
        silence_s: float,
    ) -> None:
        self._reactor = means.clock
        self._workers = means.workers
        self._readiness = readiness
        self._format = config.mutable_format
        self._usual = (config.params.required_shares, config.params.total_shares)
        self._settings = MutableSettings(happy=config.happy, silence_s=silence_s)
        self.files = MutableFiles(
            means,
            usual=self._usual,
            settings=self._settings,
            known=VersionCache(config.caches[0] / KNOWN_NAME if config.caches else None),
        )

    def close(self) -> None:
        """Cancel the running changes; called when the grid is closed."""
        self.files.close()

    async def create(
        self,
        source: SourceLike | ContentOfKey,
        format: str | None,
        params: Params | None,
        progress: Progress | None,
        private_key: bytes | None = None,
    ) -> CreateResult:
        """Store a new file; see ``Grid.create_mutable``."""
        check_kind(private_key, (bytes, type(None)), "a private key", "bytes", secret=True)
        check_kind(params, (Params, type(None)), "how a file is encoded", "a Params")
        check_callable(progress, "progress")
        if format is None:
            format = self._format
        chosen = _FORMATS.get(format.lower()) if isinstance(format, str) else None
        if chosen is None:
            raise UsageError(
                f"a mutable file is of the format 'sdmf' or 'mdmf', not {shown(format)}; choose one"
            )
        if private_key is None:
            self.files.keys.prepare()  # create the key while reading and connecting
        content = source if callable(source) else await self._read_source(source)
        usual = self._usual if params is None else (params.required_shares, params.total_shares)
        await self._readiness.wait(min(self._settings.happy, usual[1]), storing=True)
        result = await self.files.create(content, chosen, usual, private_key)
        if progress is not None and not callable(content):
            progress(len(content), len(content))
        return result

    async def _read_source(self, source: SourceLike) -> bytes:
        # Content given as bytes is in memory and does not change, so reading it needs no thread.
        at_hand = isinstance(source, bytes)
        opened: Source
        if at_hand:
            opened = open_source(source)
        else:
            most = self._settings.max_content_bytes
            opened = await open_for_put(source, self._workers, self._reactor, most)
        with closing(opened):
            if opened.size > self._settings.max_content_bytes:
                raise UsageError(
                    f"{opened.name} has {opened.size} bytes, too many for a mutable file that is written "
                    f"whole ({self._settings.max_content_bytes} are allowed); store it as an immutable one"
                )
            if at_hand:
                return bytes(opened.read_at(0, opened.size))
            return bytes(await self._workers.run(opened.read_at, 0, opened.size))

    async def get(
        self,
        cap: MutableCap,
        sink: SinkLike,
        start: int,
        length: int | None,
        progress: Progress | None,
        range_of: RangeOfVersion | None = None,
    ) -> GetResult:
        """
        Read a range of a file into a sink; see ``Grid.get``. ``range_of`` is called for each version that is
        tried.
        """
        _check_readable(cap, start, length)
        check_callable(progress, "progress")
        await self._readiness.wait(self._usual[0])
        began_s = self._reactor.seconds()
        wanted = Wakeup(self._reactor)
        readers: list[Retrieve] = []

        def changed() -> None:
            for each in [wanted, *(reader.changed for reader in readers)]:
                each.fire()

        if isinstance(sink, PartFile):
            sink.begin(0)
        target = open_sink(sink, changed, self._workers)
        done = 0

        def write(pieces: Sequence[Buffer]) -> None:
            nonlocal done
            target.write(pieces)
            done += sum(map(len, pieces))
            if progress is not None:
                progress(done, done if length is None else max(done, length))

        def ready() -> bool:
            target.check()
            return target.ready

        def reading(reader: Retrieve) -> None:
            readers[:] = [reader]

        try:
            result: ReadResult = await self.files.read(
                cap,
                write,
                range_of or (lambda _: (start, length)),
                ready=ready,
                reading=reading,
            )
            while target.pending_bytes:
                await wanted.wait()
                target.check()
            await target.flushed()
        finally:
            target.finish()
        elapsed_s = self._reactor.seconds() - began_s
        return GetResult(result.size, result.shares_used, result.corrupt, elapsed_s)

    async def size(self, cap: MutableCap) -> int:
        """Return the size of a file's best version in bytes; see ``Grid.size``."""
        _check_readable(cap, 0, None)
        await self._readiness.wait(self._usual[0])
        return await self.files.size(cap)

    async def look_ahead(self, cap: MutableCap) -> None:
        await self._readiness.wait(self._usual[0])
        await self.files.look_ahead(cap)

    def known_content(self, cap: MutableCap) -> bytes | None:
        """
        Return the content of the newest version if it is in memory, else None; see ``Grid.known_content``.
        """
        return self.files.known.of(cap.storage_index).content

    async def overwrite(self, cap: MutableCap, source: SourceLike) -> WriteResult:
        """Replace the content of a file; see ``Grid.overwrite``."""
        content = await self._read_source(source)
        await self._readiness.wait(self._usual[0])
        return await self.files.overwrite(cap, content)

    async def update(self, cap: MutableCap, offset: int, data: bytes) -> WriteResult:
        """Overwrite a range of a file; see ``Grid.update``."""
        check_whole(offset, "where to write")
        check_kind(data, (bytes, bytearray, memoryview), "what to write", "bytes")
        await self._readiness.wait(self._usual[0])
        return await self.files.update(cap, offset, bytes(data))

    async def modify(
        self,
        cap: MutableCap,
        edit: ContentEdit,
        merge: Merge | None,
        remembered: bytes | None = None,
        redo: Redo | None = None,
    ) -> WriteResult:
        """Apply an edit to a file; see ``Grid.modify``."""
        check_kind(remembered, (bytes, type(None)), "what is remembered of a file", "bytes")
        check_callable(merge, "merge")
        check_callable(redo, "redo")
        if not callable(edit):
            raise UsageError(
                f"a change is a function from old bytes to new bytes, not {shown(edit)}"
            )
        if remembered is not None:
            await recall(self.files.known, cap, remembered, self._workers)
        await self._readiness.wait(self._usual[0])
        return await self.files.modify(cap, edit, merge, redo)

    async def check(self, cap: MutableCap, verify: bool, add_lease: bool) -> CheckResult:
        """Check a file; see ``Grid.check``. The result also has the versions that were found."""
        await self._readiness.wait(self._usual[0], all_reported=True)
        return await self.files.check(cap, verify, add_lease)

    async def repair(self, cap: MutableCap, force: bool) -> RepairResult:
        await self._readiness.wait(self._usual[0], all_reported=True)
        return await self.files.repair(cap, force)

    async def renew(self, cap: MutableCap) -> RenewResult:
        await self._readiness.wait(self._usual[0], all_reported=True)
        return await self.files.renew(cap)


def _check_readable(cap: MutableCap, start: int, length: int | None) -> None:
    check_whole(start, "the beginning of a range")
    if start < 0 or (length is not None and check_whole(length, "the length of a range") < 0):
        raise UsageError("a range has neither a beginning nor a length below 0; give others")
    if cap.access == "verify":
        raise CapError("this is a verifier cap: it checks a file's shares but cannot read the file")
