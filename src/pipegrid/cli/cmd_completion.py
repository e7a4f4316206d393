"""``pipegrid completion``: prints or installs the script for completing commands in a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import click

from pipegrid.cli import completion
from pipegrid.cli.command_job import OfflineJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import common_options, usage_error
from pipegrid.disk import atomic_write
from pipegrid.errors import SinkError

SHELLS = ("bash", "zsh", "fish")
ASK_S = 10
"""How long a shell may take to start and answer, in seconds."""

_MARK = "pipegrid-completion:"
_ASK_BASH = f"""
for each in _comp_load __load_completion _completion_loader; do
    if declare -F $each >/dev/null; then echo {_MARK}loads; fi
done"""
_ASK_ZSH = f"""
print -r -- {_MARK}started
if (( $+functions[compdef] )); then print -r -- {_MARK}completes; fi
for each in $fpath; do print -r -- {_MARK}$each; done"""


class ScriptPlace(NamedTuple):
    """
    Where to install the completion script of a shell, and what the user still has to do so that the shell
    finds it.
    """

    path: Path
    to_do: str = ""


@click.command(name="completion")
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@click.option(
    "--install",
    is_flag=True,
    help="Write the script where the shell looks for it, and print its path.",
)
@common_options
def completion_command(shell: str | None, install: bool) -> OfflineJob:
    """
    Print the script that makes Tab complete pipegrid's commands in SHELL (bash, zsh or fish).

    Without SHELL it is for the shell in $SHELL. With --install the script is written to a file below your
    home directory, and what your shell still needs to find it there is printed. Completion works in shells
    started later.
    """
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise usage_error("name the shell: bash, zsh or fish")

    def work(console: Console) -> int:
        text = completion.script(name)
        if not install:
            console.result(text.rstrip("\n"), {"shell": name, "script": text})
            return ExitStatus.DONE
        place = {"bash": _bash, "zsh": _zsh, "fish": _fish}[name]()
        _write(place.path, text)
        console.result(str(place.path), {"shell": name, "path": str(place.path)})
        if place.to_do:
            console.note(place.to_do)
        return ExitStatus.DONE

    return OfflineJob(work)


def _write(path: Path, text: str) -> None:
    """
    Write a script that all users can read.

    Raises:
        SinkError: the script cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.replace_file(path, text.encode(), mode=0o644)
    except OSError as error:
        raise SinkError(f"cannot write {path}: {error.strerror}") from error


def _below_home(variable: str, default: str) -> Path:
    """Return the directory that an environment variable names, or the default below the home directory."""
    named = os.environ.get(variable, "")
    return Path(named) if os.path.isabs(named) else Path.home() / default


def _bash() -> ScriptPlace:
    named = os.environ.get("BASH_COMPLETION_USER_DIR", "")
    home = Path(named) if os.path.isabs(named) else _data() / "bash-completion"
    path = home / "completions" / "pipegrid"
    if _answers("bash", _ASK_BASH):
        return ScriptPlace(path)
    return ScriptPlace(
        path,
        "bash does not read that file, since bash-completion is not loaded; add this line to ~/.bashrc: "
        f". {shlex.quote(str(path))}",
    )


def _zsh() -> ScriptPlace:
    """Choose the first writable directory below the home directory that zsh searches, or a new one."""
    answers = _answers("zsh", _ASK_ZSH)
    home = Path.home()
    todo = "" if "completes" in answers else "autoload -Uz compinit && compinit"
    for each in answers:
        directory = Path(each)
        if home in directory.parents and directory.is_dir() and os.access(directory, os.W_OK):
            break
    else:
        directory = _data() / "zsh" / "site-functions"
        looks = f"fpath=({shlex.quote(str(directory))} $fpath)"
        todo = f"{looks}; {todo}" if todo else f"{looks} (above compinit)"
    told = (
        f"zsh does not read that directory yet; add this line to ~/.zshrc: {todo}" if todo else ""
    )
    return ScriptPlace(directory / "_pipegrid", told)


def _fish() -> ScriptPlace:
    directory = _below_home("XDG_CONFIG_HOME", ".config")
    return ScriptPlace(directory / "fish" / "completions" / "pipegrid.fish")


def _data() -> Path:
    return _below_home("XDG_DATA_HOME", ".local/share")


def _answers(shell: str, question: str) -> list[str]:
    """
    Run ``question`` in an interactive shell, with its user's configuration; return the marked lines that it
    prints.

    The list is empty if the shell is not installed, or does not answer in time.
    """
    try:
        done = subprocess.run(
            [shell, "-i", "-c", question],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=ASK_S,
            start_new_session=True,  # otherwise the shell takes over the terminal
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.decode(errors="surrogateescape").splitlines()
    return [line[len(_MARK) :] for line in lines if line.startswith(_MARK)]
