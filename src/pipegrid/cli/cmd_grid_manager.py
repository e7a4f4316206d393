"""``pipegrid grid-manager``: certifies storage servers, and installs certificates in a server's directory."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.command_grammar import CommandGroup
from pipegrid.cli.command_job import Invocation, OfflineJob
from pipegrid.cli.console import Console, read_given
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import EMPTY_NAME, common_options, usage_error
from pipegrid.core.text import printable
from pipegrid.errors import UsageError
from pipegrid.grid import manager_directory
from pipegrid.grid.client_paths import CONFIG_NAME, TAHOE_CONFIG_NAME
from pipegrid.server import server_certificates
from pipegrid.wire import grid_manager_certificates

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pipegrid.grid.manager_directory import GridManager, IssuedCertificate

_CONFIG = "pipegrid.grid-manager.config"
_STANDARD = "-"
MAX_DAYS = 5 * 365
"""As Tahoe-LAFS's."""


def _note_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value == "":
        raise click.BadParameter(EMPTY_NAME, ctx, param)
    if value is not None:
        ctx.meta[_CONFIG] = value


config_option = click.option(
    "-c",
    "--config",
    metavar="DIR",
    expose_value=False,
    callback=_note_config,
    help="The manager's directory; '-' reads its configuration from standard input, and prints what "
    "changes.",
)


@click.group(name="grid-manager", cls=CommandGroup)
@config_option
@common_options
def grid_manager_command() -> None:
    """
    Certify the storage servers of a grid.

    Clients that have the manager's public key in [grid_managers] store new shares only on servers with a
    valid certificate. Files and commands are those of Tahoe-LAFS's grid-manager. The configuration
    contains the manager's private key: keep it secret, and keep a copy.
    """


@grid_manager_command.command(name="create")
@config_option
@common_options
def create() -> OfflineJob:
    """Make a new grid manager, and its directory."""
    config = _config()

    def work(console: Console) -> int:
        manager = manager_directory.new_manager()
        if config == _STANDARD:
            console.result(manager.text, manager.fields)
        else:
            manager_directory.create_manager(Path(config), manager)
            console.json_result({"public_key": manager.key.public_text})
            console.note(
                f"made {config}; clients need [grid_managers] with NAME = {manager.key.public_text}"
            )
        return ExitStatus.DONE

    return OfflineJob(work)


@grid_manager_command.command(name="public-identity")
@config_option
@common_options
def public_identity() -> OfflineJob:
    """Print the manager's public key, for [grid_managers] of clients."""
    config = _config()

    def work(console: Console) -> int:
        text = _manager(config, console).key.public_text
        console.result(text, {"public_key": text})
        return ExitStatus.DONE

    return OfflineJob(work)


@grid_manager_command.command(name="add")
@click.argument("name")
@click.argument("public_key")
@config_option
@common_options
def add(name: str, public_key: str) -> OfflineJob:
    """
    Add a storage server, under any NAME.

    PUBLIC_KEY is the content of node.pubkey in the server's directory; 'serve' writes it when it announces
    the server for the first time.
    """
    config = _config()

    def work(console: Console) -> int:
        with _changing(config, console) as manager:
            manager.add(name, public_key)
        return _shown(config, console, manager, {"name": name, "public_key": manager.servers[name]})

    return OfflineJob(work)


@grid_manager_command.command(name="remove")
@click.argument("name")
@config_option
@common_options
def remove(name: str) -> OfflineJob:
    """
    Remove a storage server and its certificates.

    Certificates that its operator has stay valid until they expire.
    """
    config = _config()

    def work(console: Console) -> int:
        valid: list[IssuedCertificate] = []
        with _changing(config, console) as manager:
            if name in manager.servers:
                found = _issued(config, manager, name)
                valid = [each for each in found if _left_s(each) > 0]
            public_key = manager.servers.get(name)
            manager.remove(name)
        if config != _STANDARD:
            manager_directory.remove_certificates(Path(config), name)
        if valid:
            last = max(valid, key=_left_s).expires
            assert last is not None  # a certificate in ``valid`` has an expiry
            console.note(
                f"the certificates that '{printable(name)}' has installed stay valid, the last "
                f"until {grid_manager_certificates.minute_of(last)}"
            )
        return _shown(config, console, manager, {"name": name, "public_key": public_key})

    return OfflineJob(work)


@grid_manager_command.command(name="list")
@config_option
@common_options
def list_() -> OfflineJob:
    """List the storage servers, and until when their certificates are valid."""
    config = _config()

    def work(console: Console) -> int:
        manager = _manager(config, console)
        status = ExitStatus.DONE
        for name, public_key in sorted(manager.servers.items()):
            found = _issued(config, manager, name)
            shown = printable(name)
            lines = [f"{shown}: {public_key}"]
            lines += [f"{' ' * len(shown)}  cert {each.number}: {_said(each)}" for each in found]
            certificates = list(map(_certificate_fields, found))
            fields = {"name": name, "public_key": public_key, "certificates": certificates}
            console.result("\n".join(lines), fields)
            if any(each.problem for each in found):
                status = ExitStatus.FAILED
        return status

    return OfflineJob(work)


@grid_manager_command.command(name="sign")
@click.argument("name")
@click.argument("days", type=click.IntRange(1, MAX_DAYS))
@config_option
@common_options
def sign(name: str, days: int) -> OfflineJob:
    """
    Sign a certificate for a storage server, valid for DAYS days, and print it.

    Its operator installs it with 'pipegrid -d DIR grid-manager install FILE' or 'tahoe admin
    add-grid-manager-cert'. The manager's directory keeps a copy.
    """
    config = _config()

    def work(console: Console) -> int:

        signed = _manager(config, console).sign(name, days, time.time())
        if config != _STANDARD:
            manager_directory.store_certificate(Path(config), name, signed)
        console.result(manager_directory.certificate_text(signed), signed._asdict())
        return ExitStatus.DONE

    return OfflineJob(work)


@grid_manager_command.command(name="install")
@click.argument("file", type=click.Path(allow_dash=True, readable=False))
@click.option(
    "--name",
    metavar="NAME",
    help="The grid manager's name; its previous certificate is replaced.  [default: FILE's, without .cert]",
)
@common_options
@click.pass_obj
def install(invocation: Invocation, file: str, name: str | None) -> OfflineJob:
    """
    Install a certificate in the directory of a storage server, -d.

    FILE is what 'sign' printed; '-' is standard input. A running server announces it within ten minutes. The
    directory of a Tahoe-LAFS node is never written: use 'tahoe admin add-grid-manager-cert' there.
    """
    directory = invocation.grid_directory
    if name is None:
        name = "default" if file == _STANDARD else Path(file).name.removesuffix(".cert")

    def work(console: Console) -> int:
        if not (directory / CONFIG_NAME).exists() and (directory / TAHOE_CONFIG_NAME).is_file():
            raise UsageError(
                f"{directory} is a Tahoe-LAFS node's directory, which is never written; use 'tahoe admin "
                "add-grid-manager-cert', or 'serve --certificate FILE'"
            )
        public_key = server_certificates.own_public_key(directory)
        data = read_given(file, console.stdin, grid_manager_certificates.MAX_FILE_BYTES + 1)
        source = "standard input" if file == _STANDARD else file
        replaced = server_certificates.installed_terms(directory, name)
        terms = server_certificates.install(directory, public_key, name, data, source)
        before = "" if replaced is None else f"; it replaces one valid until {replaced.minute}"
        path = server_certificates.path_of(directory, name)
        installed = server_certificates.installed_files(directory)
        if others := ", ".join(each.name for each in installed if each != path):
            before += f"; installed as {printable(path.name)}, next to {printable(others)}"
        console.result(
            f"installed; valid until {terms.minute}{before}",
            {"path": str(path), "expires": terms.expires.isoformat()},
        )
        return ExitStatus.DONE

    return OfflineJob(work)


def _config() -> str:
    """
    Return the value of ``--config``.

    Raises:
        click.UsageError: the option is missing.
    """
    found: str | None = click.get_current_context().meta.get(_CONFIG)
    if found is None:
        raise usage_error(
            "name the grid manager's directory with --config DIR, or '-' for standard input"
        )
    return found


def _manager(config: str, console: Console) -> GridManager:
    if config != _STANDARD:
        return manager_directory.load_manager(Path(config))
    data = read_given(_STANDARD, console.stdin, manager_directory.MAX_CONFIG_BYTES + 1)
    return manager_directory.parse_manager(data, "standard input")


def _issued(config: str, manager: GridManager, name: str) -> list[IssuedCertificate]:
    if config == _STANDARD:
        return []
    return manager_directory.issued_certificates(Path(config), manager, name)


def _changing(config: str, console: Console) -> AbstractContextManager[GridManager]:
    if config != _STANDARD:
        return manager_directory.changing(Path(config))
    return nullcontext(_manager(config, console))


def _shown(config: str, console: Console, manager: GridManager, fields: dict[str, Any]) -> int:
    """Print the changed configuration if it came from standard input; else, with --json, print ``fields``."""
    if config == _STANDARD:
        console.result(manager.text, manager.fields)
    else:
        console.json_result(fields)
    return ExitStatus.DONE


def _left_s(each: IssuedCertificate) -> float:
    return -1.0 if each.expires is None else each.expires.timestamp() - time.time()


def _said(each: IssuedCertificate) -> str:
    """Return a certificate's expiry as Tahoe-LAFS's command prints it, or the problem of the certificate."""
    if each.expires is None:
        return each.problem
    left_s = _left_s(each)
    if left_s > 0:
        return f"valid until {each.expires} ({grid_manager_certificates.in_words(left_s)} in the future)"
    return f"expired {each.expires} ({grid_manager_certificates.in_words(-left_s)} ago)"


def _certificate_fields(each: IssuedCertificate) -> dict[str, Any]:
    return {
        "number": each.number,
        "expires": None if each.expires is None else each.expires.isoformat(),
        "valid": _left_s(each) > 0,
        "problem": each.problem or None,
    }
