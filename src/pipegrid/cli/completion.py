"""
Shell completion: parses the typed line, finds its possible continuations, and quotes them for the shell.
"""

from __future__ import annotations

import io
import os
import re
import signal
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from click import Command
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class

from pipegrid.cli.command_job import GridJob, Invocation
from pipegrid.cli.console import Console
from pipegrid.cli.startup.fast_mirror_args import COMPLETION
from pipegrid.core import caps
from pipegrid.core.text import CAP_STARTS
from pipegrid.errors import UsageError
from pipegrid.grid.client_paths import is_configured
from pipegrid.tree import aliases as tree_aliases
from pipegrid.tree import directory_reading, grid_paths

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


# Parsing a typed line as a shell does, and quoting names so that each stays one word.
#
# The line ends at the cursor, so its last word may have an open quote. These functions have no side effects.

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./^-]")
"""ASCII characters that have no special meaning to a shell within a word."""

_ESCAPES = dict(zip("ntrabfveE", "\n\t\r\a\b\f\v\x1b\x1b", strict=True))
_CODE = re.compile(r"x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})")


class TypedLine(NamedTuple):
    """
    A line up to the cursor.

    Attributes:
        words: the complete words, unquoted; the first is the name of the command.
        last: the word at the cursor, unquoted; empty if none has begun.
        quote: the open quote in ``last``: ``'``, ``"`` or ``$'``; empty if none.
        kept: the beginning of ``last`` that bash does not replace.
    """

    words: list[str]
    last: str
    quote: str
    kept: str


def split(text: str, breaks: str = "", fish: bool = False) -> TypedLine:
    """
    Parse a line up to the cursor.

    Args:
        breaks: characters ($COMP_WORDBREAKS); bash replaces only what follows the last unquoted one of them.
        fish: whether to apply the rules of fish, whose quotes have escapes.
    """
    words: list[str] = []
    last = quote = broken = opened = ""
    begun = False
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\" and (quote != "'" or fish):
            added, at = _escaped(text, at, quote, fish)
            last += added
            begun = True
        elif quote:
            if char == quote[-1]:
                quote = ""
            else:
                last += char
        elif char in " \t\n":
            if begun:
                words.append(last)
            last, broken, begun = "", "", False
        elif char in "'\"":
            # Only bash and zsh have $'...'.
            ansi = char == "'" and text[at - 2 : at - 1] == "$" and not fish and last.endswith("$")
            last = last[:-1] if ansi else last
            quote, opened, begun = "$'" if ansi else char, last, True
        else:
            last += char
            begun = True
            if char in breaks:
                broken = last
    return TypedLine(words, last, quote, opened if quote else broken)


def _escaped(text: str, at: int, quote: str, fish: bool) -> tuple[str, int]:
    """Return the character that an escape stands for, and the position after the escape."""
    if at == len(text):
        return "", at
    char = text[at]
    if quote == "$'" or (fish and not quote):
        found = _CODE.match(text, at)
        if found is not None:
            digits = found[0].lstrip("xuU")
            number = int(digits, 8 if found[4] else 16)
            return (chr(number) if number < 0x110000 else ""), found.end()
        if char in _ESCAPES:
            return _ESCAPES[char], at + 1
    if char == "\n":
        return "", at + 1  # an escaped line break continues the line
    special = {"'": "\\'", '"': '\\"$' if fish else '\\"$`'}.get(quote)
    if special is not None and char not in special:
        return "\\" + char, at + 1
    return char, at + 1


def for_bash(value: str, quote: str, ended: bool) -> str:
    """
    Return a value quoted for bash.

    Args:
        quote: the quote that is open before the value, or "".
        ended: whether to close the quote after the value, since nothing will follow.
    """
    add = {"": _bare, "'": _in_single, '"': _in_double, "$'": _in_ansi}[quote]
    return "".join(map(add, value)) + (quote[-1:] if ended else "")


def _bare(char: str) -> str:
    if _SAFE.match(char) or (char > "\x7f" and char.isprintable()):
        return char
    return f"\\{char}" if char.isprintable() else f"$'{_in_ansi(char)}'"


def _in_single(char: str) -> str:
    if char == "'":
        return "'\\''"
    return char if char.isprintable() else f"'$'{_in_ansi(char)}''"


def _in_double(char: str) -> str:
    if char in '\\"$`':
        return f"\\{char}"
    if char == "!":  # a backslash in double quotes does not stop history expansion
        return '"\\!"'
    return char if char.isprintable() else f"\"$'{_in_ansi(char)}'\""


def _in_ansi(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\U{ord(char):08x}" if ord(char) > 0x7F else f"\\x{ord(char):02x}"


# The scripts for bash, zsh and fish, and the format of the answers.
#
# click's own scripts pass words with their quotes, split at colons by the shell; so they could complete no
# name after ``ALIAS:``, and no name with a space. The scripts here pass the line up to the cursor as typed,
# and this module parses it. No errors are printed, since the user is typing.

LINE = "_PIPEGRID_LINE"
"""The environment variable that contains the command line up to the cursor, as typed."""

BREAKS = "_PIPEGRID_BREAKS"
"""The environment variable that contains bash's $COMP_WORDBREAKS."""

_BASH = """\
%(complete_func)s() {
    local type value
    COMPREPLY=()
    while IFS= read -r -d '' type && IFS= read -r -d '' value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            open) COMPREPLY+=("$value"); compopt -o nospace ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(_PIPEGRID_LINE="${COMP_LINE:0:COMP_POINT}" _PIPEGRID_BREAKS="$COMP_WORDBREAKS" \
%(complete_var)s=bash_complete "$1" 2>/dev/null)
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a response names open described
    local type value help line
    line="${(j: :)words[1,CURRENT-1]} $QIPREFIX$IPREFIX$PREFIX"
    response=("${(@0)$(_PIPEGRID_LINE="$line" %(complete_var)s=zsh_complete \
"${(Q)words[1]}" 2>/dev/null)}")

    for type value help in "${(@)response}"; do
        case $type in
            dir) _path_files -/ ;;
            file) _path_files -f ;;
            open) open+=("$value") ;;
            plain)
                if [[ -n $help ]]; then
                    described+=("${value//:/\\\\:}:$help")
                else
                    names+=("$value")
                fi ;;
        esac
    done

    (( $#described )) && _describe -V unsorted described -U
    (( $#open )) && compadd -U -S '' -V unsorted -a -- open
    (( $#names )) && compadd -U -V unsorted -a -- names
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

_FISH = """\
function %(complete_func)s
    set -l token (commandline -ct)
    set -l line (commandline -cp | string collect)
    for each in (env _PIPEGRID_LINE=$line %(complete_var)s=fish_complete %(prog_name)s 2>/dev/null)
        switch $each
            case file
                complete -C "'' $token"
            case dir
                complete -C "'' $token" | string match -r '.*/(?=$|\\t)'
            case '+*'
                string sub -s 2 -- $each
        end
    end
end

complete --no-files --command %(prog_name)s --arguments '(%(complete_func)s)'
"""


class _Shell(ShellComplete):
    """The code that the classes for all shells share."""

    def line(self) -> TypedLine:
        """Return the typed line, parsed from the environment variable that the script sets."""
        return split(os.environ.get(LINE, ""))

    def complete(self) -> str:
        """Return the answer to the shell's script; empty after any error."""
        try:
            line = self.line()
            return self.answer(line, self._items(line))
        except Exception:  # a broken configuration is reported when the command runs
            return ""

    def answer(self, line: TypedLine, items: list[CompletionItem[Any]]) -> str:
        """Return completions in the format that the shell's script reads."""
        raise NotImplementedError

    def _items(self, line: TypedLine) -> list[CompletionItem[Any]]:
        names = [os.path.basename(word) for word in line.words]
        # Another command, such as sudo, may precede the program's name.
        begin = names.index(self.prog_name) if self.prog_name in names else 0
        # Unlike the shell, expand ``~`` and variables in quoted words, too; that matters only for names such
        # as a directory ~.
        words = [os.path.expandvars(os.path.expanduser(word)) for word in line.words[begin + 1 :]]
        items = self.get_completions(words, line.last)
        option, found, _ = line.last.partition("=")
        if found and line.last.startswith("-"):  # click returns the value without the option
            for item in items:
                if item.type == "plain" and not str(item.value).startswith(f"{option}="):
                    item.value = f"{option}={item.value}"
        return items


class Bash(_Shell):
    """
    Completion for bash 4.4 and later, which replaces the text after the last ``:`` or ``=``, and quotes
    nothing.
    """

    name = "bash"
    source_template = _BASH

    def line(self) -> TypedLine:
        return split(os.environ.get(LINE, ""), os.environ.get(BREAKS, ""))

    def answer(self, line: TypedLine, items: list[CompletionItem[Any]]) -> str:
        fields = []
        for item in items:
            kind, value = _kind(item), str(item.value)
            if kind in ("open", "plain"):
                if not value.startswith(line.kept):
                    continue
                value = for_bash(value[len(line.kept) :], line.quote, kind == "plain")
            fields += [kind, value]
        return "".join(f"{field}\0" for field in fields)


class Zsh(_Shell):
    """Completion for zsh, which quotes the text it inserts."""

    name = "zsh"
    source_template = _ZSH

    def answer(self, line: TypedLine, items: list[CompletionItem[Any]]) -> str:
        fields = [field for item in items for field in (_kind(item), item.value, item.help or "")]
        return "".join(f"{field}\0" for field in fields)


class Fish(_Shell):
    """Completion for fish, which quotes the text it inserts, and reads one name per line."""

    name = "fish"
    source_template = _FISH

    def line(self) -> TypedLine:
        return split(os.environ.get(LINE, ""), fish=True)

    def answer(self, line: TypedLine, items: list[CompletionItem[Any]]) -> str:
        lines = []
        for item in items:
            kind, value = _kind(item), str(item.value)
            if kind in ("file", "dir"):
                lines.append(kind)
            elif value.isprintable():  # other names may contain line breaks
                lines.append(f"+{value}" + (f"\t{item.help}" if item.help else ""))
        return "".join(f"{each}\n" for each in lines)


def _kind(item: CompletionItem[Any]) -> str:
    """
    Return click's type of a completion, or ``open`` if more text must follow, as after a directory's slash.
    """
    if item.type == "plain" and str(item.value).endswith(("/", ":")):
        return "open"
    return item.type


def script(shell: str) -> str:
    """Return the script with which bash, zsh or fish completes pipegrid's commands."""
    kind = {each.name: each for each in (Bash, Zsh, Fish)}[shell]
    return kind(Command("pipegrid"), {}, "pipegrid", COMPLETION).source()


def answer_shells() -> None:
    """Register the classes for bash, zsh and fish with click, in place of click's own."""
    for each in (Bash, Zsh, Fish):
        add_completion_class(each)


# Completion of names on a grid: aliases, and the entries of a directory.
#
# The user waits, and has not run a command yet. So a directory is read as ``ls`` reads it, no grid is made if
# none is configured, and errors are not reported. After ``LIMIT_S``, or if a directory is too large, no
# completions are offered.

LIMIT_S = 2.0
MAX_NAMES = 300
MAX_DIRECTORY_BYTES = 4 << 20
"""The largest directory that is read; it has about 10,000 entries."""


def on_grid(invocation: Invocation, text: str) -> list[CompletionItem[str]]:
    """
    Return completions for an argument that names an object on a grid.

    Args:
        invocation: gives the client's directory, and runs jobs with a grid.
        text: the typed part of the argument.
    """
    if ":" not in text:
        return [] if "/" in text else aliases(invocation, text)
    cut = text.rfind("/") + 1 or _run_end(text) or text.index(":") + 1
    head, begun = text[:cut], unicodedata.normalize("NFC", text[cut:])
    if head.startswith(CAP_STARTS) and "/" not in head:
        return []
    home = invocation.grid_directory
    if not is_configured(home):
        return []

    if not _is_in_run(head, home):
        grid_paths.parse_here(head, home)  # raises an error before a grid is opened
    return _items(head, _read(invocation, head), begun)


def _is_in_run(path: str, home: Path) -> bool:
    """Return whether a path is ``NAME@TIME:some/path``, and does not begin with an alias."""
    if "@" not in path:
        return False
    from pipegrid.tree.backup import run_paths

    return run_paths.run_path_here(path, home) is not None


def _run_end(text: str) -> int:
    """
    Return the position after ``NAME@TIME:`` at the beginning of a text; 0 if the text has no such beginning.
    """
    if "@" not in text:
        return 0
    from pipegrid.tree.backup import run_paths

    return run_paths.names_start(text)


def anywhere(invocation: Invocation, text: str) -> list[CompletionItem[str]]:
    """
    Return completions for an argument that names an object on a grid or a local file; the shell completes
    text that cannot begin with an alias.
    """
    here = [CompletionItem(text, type="file")]
    if text.startswith(CAP_STARTS):
        return on_grid(invocation, text) or here
    if "/" in text.partition(":")[0]:
        return here
    alias, colon, _ = text.partition(":")
    found = aliases(invocation, alias + colon)
    if not found:
        return here
    if colon:
        return on_grid(invocation, text)
    try:
        with os.scandir(".") as entries:
            local = [each.name + ("/" if os.path.isdir(each.name) else "") for each in entries]
    except OSError:
        local = []
    if not text.startswith("."):
        local = [each for each in local if not each.startswith(".")]
    return found + _items("", local, text)


def aliases(invocation: Invocation, begun: str, end: str = ":") -> list[CompletionItem[str]]:
    """Return the aliases that begin with ``begun``, each followed by ``end``."""
    try:
        found = tree_aliases.read_aliases(invocation.grid_directory)
    except UsageError:
        return []
    return _items("", (name + end for name in found if "/" not in name), begun)


def _items(head: str, names: Iterable[str], begun: str) -> list[CompletionItem[str]]:
    """Return the names that begin with ``begun`` as completions, with ``head`` before each."""
    found = sorted(each for each in names if each.startswith(begun) and _can_be_typed(each))
    if len(found) > MAX_NAMES:  # the first and last name show the common beginning of all
        found = [*found[: MAX_NAMES - 1], found[-1]]
    return [CompletionItem(head + each) for each in found]


def _can_be_typed(name: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" or char == "\0" for char in name)


def _read(invocation: Invocation, path: str) -> list[str]:
    """
    Return the names in a directory on the grid, those of directories followed by a slash; none after an
    error.
    """
    found: list[str] = []

    async def work(grid: Grid, _: Console) -> int:
        if "@" in path:
            from pipegrid.tree.backup import run_paths

            root, names = await run_paths.RunFinder(grid).root_of(path)
        else:
            root, names = grid_paths.parse_here(path, grid.config.directory)
        limits = directory_reading.ListingLimits(directory_bytes=MAX_DIRECTORY_BYTES)
        place = await grid_paths.resolve(grid, root, names, limits)
        cap = place.best or place.cap
        if isinstance(cap, caps.DirectoryCap):
            held = await directory_reading.read_listing(grid, cap, limits)
            found.extend(
                entry.name + ("/" if entry.kind == "directory" else "")
                for entry in held.entries
                if entry.name and "/" not in entry.name
            )
        return 0

    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    # Only the directory's options are used: a completion writes no trace, and prints no messages.
    bare = Invocation(Console(None, None, io.StringIO()))
    bare.base_directory, bare.grid = invocation.base_directory, invocation.grid
    if invocation.run_job is not None:
        invocation.run_job(GridJob(work), bare)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return found
