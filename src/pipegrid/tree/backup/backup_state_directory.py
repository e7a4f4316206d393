"""The state directory of a client's backups, and the identity of the machine."""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pipegrid.core.caps import DirectoryCap, LitCap, parse_cap
from pipegrid.core.hashes import tagged_hash
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.core.text import decode_text
from pipegrid.disk.atomic_write import SUFFIX, replace_file, sync_path
from pipegrid.disk.private_files import make_directory, open_private
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import CapError, PipegridError, SinkError, UsageError
from pipegrid.grid.client_config import GridConfig
from pipegrid.grid.mutables import KNOWN_NAME
from pipegrid.tree.backup.catalogue import BackupRun, Machine, entry_name, entry_of, runs_of
from pipegrid.tree.backup.prune_records import PruneCandidates

# This part identifies the machine, since several machines may share one list of runs.
#
# The identity is from ``/etc/machine-id``: it is created when a system is installed, and is not copied along
# with a client's directory. Only its hash is used, as the manual of ``machine-id`` asks. Systems without this
# file, such as containers, get a random id, kept with the state of backups.

SYSTEM_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_TAG = b"pipegrid_backup_machine_v1"
_MAX_BYTES = 100
_ID_BYTES = 8


def this_machine(directory: Path, keep: bool = True) -> Machine:
    """
    Return the identity of this machine.

    Args:
        directory: the state directory of backups, which exists.
        keep: whether a new random id is written to ``directory``.

    Raises:
        OSError: a new id could not be written.
    """
    return Machine(_id(directory, keep), os.uname().nodename)


def _id(directory: Path, keep: bool) -> str:
    for path in SYSTEM_FILES:
        with suppress(OSError):
            text = read_file(Path(path), _MAX_BYTES).strip()
            if re.fullmatch(
                rb"[0-9a-f]{32}", text
            ):  # it is 'uninitialized' while a system boots for the first time
                return tagged_hash(_TAG, text)[:_ID_BYTES].hex()
    own = directory / "machine"
    with suppress(OSError):
        text = read_file(own, _MAX_BYTES).strip()
        if re.fullmatch(rb"[0-9a-f]{16}", text):
            return text.decode("ascii")
    made = os.urandom(_ID_BYTES).hex()
    if keep:
        replace_file(own, f"{made}\n".encode("ascii"))
    return made


# This part moves a state directory from its earlier place to its new one, and leaves a symbolic link.
#
# Earlier versions follow the link, and so use the same files and the same lock. If the directory cannot be
# moved, it stays complete in its earlier place, and is used there.


def relocated(old: Path, new: Path) -> Path:
    """
    Move the directory if possible; return its place, ``new``, or ``old`` if it could not be moved.

    Args:
        old: contains a file ``lock``, which a process locks while it changes the directory.
        new: if it exists already, it is used, and ``old`` stays unchanged.
    """
    if os.path.lexists(new) or not _is_itself(old):
        return new
    with suppress(OSError):  # another process uses the directory, or the new place is not writable
        lock = open_private(str(old / "lock"), os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_itself(old) and not os.path.lexists(new):  # still not moved
                _move(old, new)
        finally:
            os.close(lock)
    return new if os.path.lexists(new) else old


def _is_itself(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _move(old: Path, new: Path) -> None:
    make_directory(new.parent, 0o700)
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(old, new)
        shutil.rmtree(old, ignore_errors=True)
    with suppress(
        OSError
    ):  # without the link, earlier versions start with an empty state, as if a cache was cleared
        os.symlink(new.absolute(), old)


def _copy(old: Path, new: Path) -> None:
    """
    Copy the directory to another file system. The copy gets its name only when it is complete, and is synced
    when this returns, so the caller can remove the original.

    The copy has a fixed name while it is incomplete, so the incomplete copy of a killed process is found and
    removed. The caller holds the lock.
    """
    beside = new.with_name(f".{new.name}{SUFFIX}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        shutil.copytree(old, beside, symlinks=True)
        for path in (*beside.iterdir(), beside):
            sync_path(path)
        os.rename(beside, new)
        sync_path(new.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


# The state of a client's backups is in the directory ``backup`` next to its secrets or, for the directory of
# a Tahoe-LAFS node, in the user's data. Earlier versions used the user's cache.
#
#     lock             locked by the running backup
#     database.sqlite  which files had which cap
#     catalogue.json   the list of runs as last stored, its cap, and runs that are not in the list yet
#     machine          the id of this machine, if the system has none
#     catalogue.cap    the cap of the list, on one line: it grants changing the list
#     catalogues, candidates, forgotten    see ``prune_records``
#
# The grid has the list under that cap. The local copy is compared with the grid's list, and is used if the
# grid cannot be reached. A user may put another cap into ``catalogue.cap``, so that several machines share a
# catalogue, or a new machine continues one.

_PLACE_MAX_BYTES = 128 << 20
_MAX_CAP_BYTES = 1 << 20

_IMMUTABLE = DirectoryCap(LitCap(b""))


class CatalogueState(NamedTuple):
    """
    What a client remembers of its catalogue.

    Attributes:
        cap: the cap of the list on the grid; None: no list exists yet.
        content: the bytes of the list as last stored; None: not remembered.
        unlisted: stored runs that must still be added to the list.
        version: the sequence number of the version with this content; 0: unknown.
    """

    cap: DirectoryCap | None = None
    content: bytes | None = None
    unlisted: tuple[BackupRun, ...] = ()
    version: int = 0

    def __repr__(self) -> str:
        """Return a text for logs, without the content, since that has caps."""
        return f"CatalogueState({self.cap!r}, ..., version={self.version})"

    @property
    def runs(self) -> tuple[BackupRun, ...]:
        """All remembered runs, oldest first."""
        listed: list[BackupRun] = []
        if self.cap is not None and self.content is not None:
            listed = runs_of(self.cap, self.content)
        every = {entry_name(run): run for run in (*listed, *self.unlisted)}
        return tuple(sorted(every.values(), key=lambda run: (run.time, run.name)))


class BackupPlace:
    """
    The state directory of one client's backups.

    Args:
        config: the configuration of the client. State that an earlier version kept in another place is moved.

    Attributes:
        candidates: objects that backups of this client may have stored and that no run lists.
        own: directories that every run changes; backups skip them, since they would always be new.

    Raises:
        UsageError: the client has no place for state.
    """

    def __init__(self, config: GridConfig) -> None:
        if not config.caches:
            raise UsageError(f"{config.directory} has no place for the state of backups")
        self.directory = config.caches[0] / "backup"
        if config.state is not None:
            self.directory = relocated(self.directory, config.state / "backup")
        self.own = (self.directory, config.caches[0] / KNOWN_NAME)
        self.database = self.directory / "database.sqlite"
        self.cap_file = self.directory / "catalogue.cap"
        self.candidates = PruneCandidates(self.directory)
        self._list_file = self.directory / "catalogue.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """
        Hold the lock, so that no other backup of this client runs.

        Raises:
            UsageError: another backup holds the lock.
            SinkError: the directory cannot be created, or its files cannot be locked.
        """
        try:
            for each in self.own:
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open_private(str(self.directory / "lock"), os.O_RDWR)
        except OSError as error:
            raise SinkError(f"cannot write in {self.directory}: {error.strerror}") from error
        try:
            _lock(lock, self.directory)
            yield
        finally:
            os.close(lock)

    def machine(self, keep: bool = True) -> Machine:
        """
        Return the identity of this machine; see ``this_machine``.

        Raises:
            SinkError: the system has no id, and a new one cannot be written.
        """
        try:
            return this_machine(self.directory, keep)
        except OSError as error:
            raise SinkError(f"cannot write in {self.directory}: {error.strerror}") from error

    def noted(self, say: Callable[[str], None] = lambda sentence: None) -> CatalogueState:
        """
        Return what is remembered of the catalogue.

        Args:
            say: called with a sentence if the local copy is damaged.

        Raises:
            UsageError, CapError: the file with the cap of the catalogue cannot be used.
        """
        said = CatalogueState()
        try:
            with suppress(FileNotFoundError):
                said = self._read_list()
        except (OSError, ValueError, PipegridError):
            say(f"{self._list_file} is damaged; the list of backups is fetched from the grid")
        cap = self._read_cap()
        if cap is None or (said.cap is not None and cap in (said.cap, said.cap.readonly())):
            return said
        # The user has put another cap into ``catalogue.cap``: this client's runs must be added to the list of
        # that cap.
        return CatalogueState(cap, None, said.runs)

    def note(self, noted: CatalogueState) -> None:
        """
        Remember the state of the catalogue.

        Raises:
            SinkError: the state cannot be written.
        """
        document = {
            "cap": str(noted.cap),
            "packed": None if noted.content is None else _text(noted.content),
            "unlisted": _text(_packed(noted.unlisted)),
            "version": noted.version,
        }
        try:
            if noted.cap is not None:
                self.candidates.note_catalogue(noted.cap)
            replace_file(self._list_file, f"{json.dumps(document)}\n".encode("ascii"))
            if self._read_cap() != noted.cap:
                replace_file(self.cap_file, f"{noted.cap}\n".encode("ascii"))
        except OSError as error:
            raise SinkError(
                f"cannot write in {self.directory}: {error.strerror}; free some space, and run the backup "
                "again"
            ) from error

    def _read_list(self) -> CatalogueState:
        said = json.loads(read_file(self._list_file, _PLACE_MAX_BYTES).decode("ascii"))
        if not isinstance(said, dict):
            raise ValueError("no object")
        cap = parse_cap(str(said.get("cap")))
        if not isinstance(cap, DirectoryCap):
            raise ValueError("no directory")
        packed = said.get("packed")
        content = None if packed is None else base64.b64decode(str(packed), validate=True)
        unlisted = base64.b64decode(str(said.get("unlisted", "")), validate=True)
        version = said.get("version", 0)
        number = version if type(version) is int else 0
        noted = CatalogueState(cap, content, tuple(runs_of(_IMMUTABLE, unlisted)), number)
        assert noted.runs is not None  # raises if the content is damaged
        return noted

    def _read_cap(self) -> DirectoryCap | None:
        try:
            text = decode_text(read_file(self.cap_file, _MAX_CAP_BYTES), str(self.cap_file)).strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(
                f"cannot read {self.cap_file}: {error}; restore or remove it"
            ) from error
        try:
            cap = parse_cap(text)
        except CapError as error:
            raise UsageError(f"{self.cap_file}: {error}; restore or remove it") from error
        if not isinstance(cap, DirectoryCap):
            raise UsageError(
                f"{self.cap_file} does not hold the cap of a catalogue; restore or remove it"
            )
        return cap


def _lock(fd: int, directory: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another backup is running with the state in {directory}; wait until it has ended"
        ) from None
    except OSError as error:  # some network file systems have no locks
        raise SinkError(
            f"cannot lock {directory}/lock: {error.strerror}; a backup needs locks: keep the client's "
            "directory on a disk that has them"
        ) from error


def _packed(runs: Sequence[BackupRun]) -> bytes:
    links = map(entry_of, runs)
    return pack_immutable([PackedChild(link.name, link.cap, link.metadata or {}) for link in links])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
