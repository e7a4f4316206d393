"""``pipegrid serve``: runs a storage server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import log_file, serve_record
from pipegrid.cli.command_job import GridJob, Invocation, OpenGrid, failure
from pipegrid.cli.console import Console, columns
from pipegrid.cli.error_report import ExitStatus, Interrupted
from pipegrid.cli.options import (
    RELAY_URL,
    byte_space,
    common_options,
    connection_limit_options,
    gathered,
    kept_duration,
    log_option,
    relay_option,
)
from pipegrid.cli.startup import lazy_modules
from pipegrid.core.text import amount
from pipegrid.disk import directory_claim
from pipegrid.errors import UsageError
from pipegrid.grid import serve_settings
from pipegrid.reactor.process_settings import SHORTAGE
from pipegrid.server import serve, storage_clients, systemd
from pipegrid.storage import client_space, share_file, space_quota
from pipegrid.wire import server_address

if TYPE_CHECKING:
    from pipegrid.grid.serve_settings import ServerDirectory
    from pipegrid.server.serve import ServeSettings, StorageNode
    from pipegrid.wire.server_address import Furl


class ServeOptions(NamedTuple):
    """
    The options of ``serve``; see their declarations. None: not given, so the directory's setting or the
    default applies.

    Attributes:
        introducers: fURLs, or ``configured``, or ``none``.
        certificates: the paths of files with certificates.
    """

    port: str | None = None
    location: str | None = None
    storage: str | None = None
    reserved_bytes: int | None = None
    quota_bytes: int | None = None
    usage: bool = False
    client: str | None = None
    client_quota_bytes: int | None = None
    remove_client: str | None = None
    keep_unfinished_s: int | None = None
    read_only: bool | None = None
    durability: str = "batch"
    expire_leases: bool = False
    metrics: str | None = None
    introducers: tuple[str, ...] = ()
    nickname: str | None = None
    certificates: tuple[str, ...] = ()
    max_connections: int | None = None
    max_per_address: int | None = None
    log_path: str | None = None
    join: str | None = None
    relay_url: str = RELAY_URL
    tor: bool | None = None
    tor_control_port: str | None = None

    def settings(
        self, directory: Path, introducers: dict[str, Furl], found: ServerDirectory
    ) -> ServeSettings:
        """
        Return the settings of a server: from the options, or, where an option is not given, from the
        directory.

        Raises:
            UsageError: options contradict each other.
        """
        self.check()
        settings = found.serve_settings(
            directory,
            **self._places(directory, found),
            storage=None if self.storage is None else Path(self.storage),
            reserved_bytes=self.reserved_bytes,
            quota_bytes=self.quota_bytes,
            keep_unfinished_s=self.keep_unfinished_s,
            read_only=self.read_only or None,
            durability=self.durability,
            expiry=share_file.Expiry() if self.expire_leases else None,
            metrics=self.metrics,
            introducers=introducers,
            nickname=self.nickname,
            certificate_files=(
                *found.settings.get("certificate_files", ()),
                *(Path(os.path.abspath(each)) for each in self.certificates),
            ),
            max_connections=self.max_connections,
        )
        import attrs

        if self.tor:
            return attrs.evolve(settings, location=None)
        if self.tor is None:
            return settings
        location = settings.location
        if self.location is None and ("location" in found.detected or "onion" in found.settings):
            # The server stops being an onion service, so the onion address is removed from the location.
            hints = (location or "").split(",")
            location = ",".join(each for each in hints if not each.startswith("tor:")) or None
        return attrs.evolve(settings, onion=None, location=location)

    def _places(self, directory: Path, found: ServerDirectory) -> dict[str, Any]:
        """Return the settings that say where the server listens, and how clients reach it."""
        given: dict[str, Any] = {
            "port": self.port,
            "location": self.location,
            "max_per_address": self.max_per_address,
        }
        if not self.tor:
            return given
        onion = found.onion_settings(directory, self.port, self.tor_control_port)
        return {**onion, "max_per_address": self.max_per_address or onion["max_per_address"]}

    def check(self) -> None:
        """
        Check that the options do not contradict each other, before anything is sent.

        Raises:
            UsageError: options contradict each other.
        """
        if self.client is not None and self.remove_client is not None:
            raise UsageError("--client and --remove-client cannot be given together; give one")
        if self.client is None and self.client_quota_bytes is not None:
            raise UsageError("--client-quota is of one client; give --client, too")
        if not self.tor:
            if self.tor_control_port is not None:
                raise UsageError("--tor-control-port is for an onion service; give --tor, too")
            return
        if self.location is not None:
            raise UsageError(
                "--tor makes the address for clients; leave --location out, or give --no-tor"
            )
        if self.join is not None:
            raise UsageError(
                "--join and --tor cannot be given together; join with 'pipegrid join' first, and then 'serve "
                "--tor'"
            )


class _ServerJob(GridJob):
    asks_servers = False

    def __init__(self, options: ServeOptions) -> None:
        self._options = options


class ServeJob(_ServerJob):
    """A job that runs a storage server until it is stopped, which counts as success."""

    async def run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        """Run the server; cancelling stops it in an orderly way, and gives status 0."""
        lazy_modules.bring_in(log_file, serve_record, serve, systemd)
        console = invocation.console
        # Called first, so that a lack of memory in the code below ends the process, too.
        forget = systemd.end_without_memory()
        try:
            with log_file.logging_to(console, self._options.log_path, reactor):
                SHORTAGE.tell = None  # the log reports a shortage of threads
                if self._options.join is None:
                    settings, options = settings_of(
                        invocation.grid_directory, self._options, console.note
                    )
                    await serve.serve(
                        reactor, settings, lambda node: self._started(invocation, options, node)
                    )
                else:
                    await self._join_and_serve(invocation, reactor, self._options.join)
        except Exception as error:
            return failure(error, console)
        finally:
            forget()
        return ExitStatus.DONE

    async def _join_and_serve(self, invocation: Invocation, reactor: Any, code: str) -> None:
        """
        Join a grid, and run a storage server for it.

        Raises:
            InvitationError: the server did not become a member; it has stopped, and nothing is configured.
            Interrupted: the server was stopped before it became a member.
        """
        # Imported only here, since the library for invitations is not always installed.
        from pipegrid.cli import cmd_join

        console, options = invocation.console, self._options
        directory_claim.refuse_if_running(invocation.grid_directory)
        # Settings are checked before the code is used up: the server would refuse wrong ones only when it
        # starts.
        settings, options = settings_of(invocation.grid_directory, options, lambda _: None)
        serve.check_hidden(settings)
        said = {
            "tub.port": options.port or "",
            "tub.location": options.location or "",
            "nickname": options.nickname or "",
        }
        joining = cmd_join.ServerJoin(invocation.grid_directory, code, options.relay_url, said)

        async def finish(node: StorageNode) -> None:
            said["tub.port"] = serve_record.kept_port(options.port or "", node)
            try:
                await joining.finish(node, console)
            finally:
                await joining.close()
            self._started(invocation, options, node)

        try:
            taken = await joining.take(reactor, console)
            settings, _ = settings_of(invocation.grid_directory, self._options, console.note)
            import attrs

            introducers = {each.name: each.furl for each in taken.introducers}
            settings = attrs.evolve(settings, introducers={**settings.introducers, **introducers})
            await serve.serve(reactor, settings, finish)
        finally:
            await joining.close()
        if not joining.joined:
            raise Interrupted

    def _started(self, invocation: Invocation, options: ServeOptions, node: StorageNode) -> None:
        failed = serve_record.keep(invocation.grid_directory, options._asdict(), node)
        if failed is not None:
            invocation.console.note(failed)
        announce(invocation.console, node)


class UsageJob(_ServerJob):
    """
    A job that prints how much space the shares in a storage directory take, even while a server runs there.
    """

    async def _run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        from twisted.internet.task import deferLater

        directory = invocation.grid_directory
        options, known = self._options, serve_record.read(directory)
        found = {**known, **serve_settings.load(directory).settings}
        storage = Path(options.storage or found.get("storage") or directory / "storage")
        if not storage.is_dir():
            raise UsageError(
                f"there is no storage directory {storage}; give it with -d or --storage"
            )
        measured = space_quota.StoredSpace()
        clients = ClientTotals(storage_clients.read_clients(directory))
        began = reactor.seconds()
        try:
            for _ in measured.measure(storage, clients.add):
                if reactor.seconds() - began > _TURN_S:  # so that Ctrl-C can end the job
                    await deferLater(reactor, 0)
                    began = reactor.seconds()
        except OSError as error:
            raise UsageError(
                f"cannot read {error.filename or storage}: {error.strerror}; run this as the server's user"
            ) from error
        note = space_quota.read_note(storage)
        given = options.quota_bytes, found.get("quota_bytes"), note and note.quota_bytes
        quota = next((each for each in given if each is not None), None) or None
        text, fields = usage_report(storage, measured, quota)
        rows, fields["clients"] = clients.report()
        invocation.console.result("\n".join([text, *rows]), fields)
        return ExitStatus.DONE


class ClientTotals:
    """Counts the space of the shares on which each named client has leases."""

    def __init__(self, clients: Sequence[storage_clients.NamedClient]) -> None:
        self._clients = {each.number: each for each in clients}
        self._totals = {each.number: space_quota.ShareTotal() for each in clients}

    def add(self, path: str) -> None:
        """Count a share, or an unfinished upload, for each named client that has a lease on it."""
        if self._clients:
            for number, size in client_space.read_share(path).charges(0).items():
                if number in self._clients:
                    self._totals[number].add(size)

    def report(self) -> tuple[list[str], dict[str, object]]:
        """Return the lines of a table, and the JSON fields by the names of clients."""
        rows: list[list[str]] = []
        fields: dict[str, object] = {}
        for number, client in self._clients.items():
            total, left = self._totals[number], None
            text = amount(total.bytes)
            if client.quota_bytes:
                left = max(0, client.quota_bytes - total.bytes)
                text += f" of {amount(client.quota_bytes)}, {amount(left)} left"
            word = "share" if total.shares == 1 else "shares"
            rows.append([f"client {client.name}", str(total.shares), word, text])
            fields[client.name] = {
                "shares": total.shares,
                "bytes": total.bytes,
                "quota": client.quota_bytes or None,
                "left": left,
            }
        return columns(rows, right=(1,)) if rows else [], fields


class ClientJob(_ServerJob):
    """
    A job that adds, changes or removes a named client of a server, even while the server runs. It prints the
    addresses of a client that was added or changed.
    """

    async def _run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        directory, options = invocation.grid_directory, self._options
        if options.remove_client is not None:
            storage_clients.remove_client(directory, options.remove_client)
            invocation.console.result(
                f"removed the client {options.remove_client}", {"removed": options.remove_client}
            )
            return ExitStatus.DONE
        assert options.client is not None
        storage_clients.check_served(directory)
        client = storage_clients.keep_client(directory, options.client, options.client_quota_bytes)
        nurls, furl = storage_clients.addresses(directory, client)
        quota = amount(client.quota_bytes) if client.quota_bytes else "none"
        invocation.console.say(f"the quota of {client.name}: {quota}")
        fields = {"client": client.name, "nurls": nurls, "furl": furl, "quota": client.quota_bytes}
        invocation.console.result("\n".join([*nurls, furl]), fields)
        return ExitStatus.DONE


_TURN_S = 0.05


def usage_report(
    storage: Path, measured: space_quota.StoredSpace, quota_bytes: int | None
) -> tuple[str, dict[str, object]]:
    """Return the numbers and sizes of the shares in a storage directory, as a table and as JSON fields."""
    kinds = {
        "immutable": measured.immutable,
        "mutable": measured.mutable,
        "unfinished": measured.unfinished,
        "all": measured.all,
    }
    rows = [
        [name, str(each.shares), "share" if each.shares == 1 else "shares", amount(each.bytes)]
        for name, each in kinds.items()
    ]
    left = None
    if quota_bytes is not None:
        left = max(0, quota_bytes - measured.all.bytes)
        rows[-1][-1] += f" of {amount(quota_bytes)}, {amount(left)} left"
    fields: dict[str, object] = {
        name: {"shares": each.shares, "bytes": each.bytes} for name, each in kinds.items()
    }
    fields |= {"quota": quota_bytes, "left": left, "storage": str(storage)}
    return "\n".join(columns(rows, right=(1,))), fields


def settings_of(
    directory: Path, options: ServeOptions, warn: Callable[[str], object]
) -> tuple[ServeSettings, ServeOptions]:
    """
    Return the settings of a server, and its options: the given ones, and for others those of the last start.

    Args:
        warn: is called with a sentence for each setting of the directory that is not supported, for each
            option that is taken from the last start or contradicts a setting, and for a location with another
            port.

    Raises:
        UsageError: a server runs in the directory already, or a setting is invalid.
    """
    directory_claim.refuse_if_running(directory)
    found = serve_settings.load(directory)
    for warning in found.warnings:
        warn(warning)
    is_moved = options.port is not None and options.location is None
    restored = serve_record.restored(directory, options._asdict(), found)
    options = options._replace(**restored.values)
    for note in restored.notes:
        warn(note)
    if is_moved and not found.is_tahoe and serve_record.is_known(directory):
        found = found.without_detected()
    introducers = introducers_of(directory, found, options.introducers)
    settings = options.settings(directory, introducers, found)
    if is_moved and settings.location is not None and settings.onion is None:
        ports = set(re.findall(r"\d+", settings.port))
        if not any(each.rpartition(":")[2] in ports for each in settings.location.split(",")):
            warn(
                f"--port is {settings.port}, and clients are sent to {settings.location}, another port; give "
                "--location, too, unless that port leads here"
            )
    return settings, options


@click.command(name="serve")
@click.option(
    "--port",
    metavar="PORT",
    help="A TCP port or a Twisted endpoint; 'tcp:0:interface=127.0.0.1' takes any free one.  "
    "[default: the directory's, or tcp:8098]",
)
@click.option(
    "--location",
    metavar="HOST:PORT",
    help="Where clients find the server.  [default: the directory's, or what it listens on]",
)
@click.option(
    "--storage",
    type=click.Path(file_okay=False, readable=False),
    metavar="DIR",
    help="The storage directory, perhaps a Tahoe-LAFS server's.  [default: 'storage' in -d]",
)
@click.option(
    "--reserved-space",
    "reserved_bytes",
    type=byte_space,
    metavar="SIZE",
    help="Disk space to leave free, such as 1G.",
)
@click.option(
    "--quota",
    "quota_bytes",
    type=byte_space,
    metavar="SIZE",
    help="Space for all shares and unfinished uploads, such as 500GB; 0 for none.",
)
@click.option(
    "--usage",
    is_flag=True,
    help="Print how much the shares take, and how much the quota leaves, and exit; also while a server runs.",
)
@click.option(
    "--client",
    metavar="NAME",
    help="Give a client addresses and a quota of its own, print the addresses, and exit; for a client that "
    "has them, print them again. Also while a server runs.",
)
@click.option(
    "--client-quota",
    "client_quota_bytes",
    type=byte_space,
    metavar="SIZE",
    help="Space for the shares that this client has leases on, such as 100GB; 0 for none.",
)
@click.option(
    "--remove-client",
    metavar="NAME",
    help="Take its addresses from a client, and exit; its shares stay until their leases expire.",
)
@click.option(
    "--keep-unfinished",
    "keep_unfinished_s",
    type=kept_duration,
    metavar="TIME",
    help="How long unfinished uploads are kept after their last write, so that they can be resumed, unless "
    "their space is needed: '12 hours', '30 minutes'.  [default: 7 days]",
)
@click.option("--read-only", is_flag=True, default=None, help="Accept no new shares.")
@click.option(
    "--durability",
    type=click.Choice(["none", "batch", "strict"]),
    default="batch",
    show_default=True,
    help="What must be on the disk before a share is acknowledged.",
)
@click.option("--expire-leases", is_flag=True, help="Remove shares whose leases have all expired.")
@click.option(
    "--metrics", metavar="PORT", help="Serve metrics for Prometheus at this port or endpoint."
)
@click.option(
    "--introducer",
    "introducers",
    multiple=True,
    metavar="FURL",
    help="Announce the server to this introducer; 'configured' means those of the directory (a Tahoe-LAFS "
    "node's default), 'none' means none.",
)
@click.option(
    "--join",
    metavar="CODE",
    help="Join the grid that CODE leads to, which 'pipegrid invite' printed: the server is announced to its "
    "introducer or added to the inviter's servers, and the directory becomes a client's of the grid.",
)
@relay_option
@click.option(
    "--tor/--no-tor",
    default=None,
    help="Be an onion service: Tor, which must be running, hides where the server is. It listens on this "
    "machine only, and its address for clients is the onion service's. A server that was one stays one; "
    "--no-tor serves it openly.",
)
@click.option(
    "--tor-control-port",
    metavar="ENDPOINT",
    help="Tor's control port, for --tor.  [default: the directory's, or unix:/run/tor/control, "
    "tcp:127.0.0.1:9051 or 9151]",
)
@click.option("--nickname", metavar="NAME", help="The server's nickname.")
@click.option(
    "--certificate",
    "certificates",
    multiple=True,
    type=click.Path(dir_okay=False, readable=False),
    metavar="FILE",
    help="Announce this certificate of a grid manager, in addition to those that 'grid-manager install' has "
    "installed in -d; may be repeated.",
)
@connection_limit_options
@log_option
@common_options
@gathered("options", ServeOptions)
def serve_command(options: ServeOptions) -> GridJob:
    """
    Store other people's shares, for PipeGrid and Tahoe-LAFS clients, until it is stopped.

    Prints the server's NURLs and its fURL. Each is an address and the secret that opens it: NURLs for
    clients that speak HTTPS, the fURL for those that speak Foolscap. -d is the node's directory, which
    keeps the server's key. It may be a Tahoe-LAFS node's directory: its tahoe.cfg is followed, and options
    given here take precedence. A later start keeps port, location, storage, spaces, nickname, introducers and
    Tor as they were given last, where its settings say nothing else.
    """
    options.check()
    if options.client is not None or options.remove_client is not None:
        return ClientJob(options)
    return UsageJob(options) if options.usage else ServeJob(options)


def introducers_of(
    directory: Path, found: ServerDirectory, given: tuple[str, ...]
) -> dict[str, Furl]:
    """
    Return the introducers to which the server is announced. By default these are the introducers in the
    directory, if it is a Tahoe-LAFS node's or has the setting ``announce``.

    Raises:
        UsageError: a given text is not a fURL, or ``configured`` is given and the directory has no
            introducer.
    """
    chosen: dict[str, Furl] = {}
    if not given and found.announces:
        chosen |= found.introducers
    for number, text in enumerate(given, 1):
        if text == "none":
            if len(given) > 1:
                raise UsageError(
                    "--introducer none excludes other introducers; give one or the other"
                )
        elif text == "configured":
            if not found.introducers:
                raise UsageError(
                    f"{directory} names no introducer; give its fURL with --introducer"
                )
            chosen |= found.introducers
        else:
            try:
                chosen[f"introducer-{number}"] = server_address.parse_furl(text.strip())
            except UsageError as error:
                raise UsageError(f"--introducer: {error}") from None
    return chosen


def announce(console: Console, node: StorageNode) -> None:
    """Print the addresses of the server."""
    fields: dict[str, object] = {
        "nurl": node.nurl,
        "nurls": node.nurls,
        "furl": node.furl,
        "storage": str(node.storage),
    }
    if node.server_id:
        fields["server_id"] = node.server_id
    console.result("\n".join([*node.nurls, node.furl]), fields)
