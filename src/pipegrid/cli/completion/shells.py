"""
What bash, zsh and fish run at Tab, and in which form they are answered.

click's own scripts hand over words that the shell has broken at colons, and quotes as they stand; so no
name behind ``ALIAS:``, and none with a blank, could be completed. Here the shell hands over the line up to
the cursor as it is typed, and ``words`` takes it apart. Whatever goes wrong, nothing is printed: a person
who types wants no sentence there.
"""

from __future__ import annotations

import os
from typing import Any

from click import Command
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class

from pipegrid.cli.completion.words import TypedLine, for_bash, split
from pipegrid.cli.plain import COMPLETION

LINE = "_PIPEGRID_LINE"
"""In the environment: the command, as typed, up to the cursor."""

BREAKS = "_PIPEGRID_BREAKS"
"""The same of bash's $COMP_WORDBREAKS."""

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
    """What all have in common."""

    def line(self) -> TypedLine:
        """Return the words before the cursor, out of the environment that the script sets."""
        return split(os.environ.get(LINE, ""))

    def complete(self) -> str:
        """Return the answer; nothing, if anything goes wrong."""
        try:
            line = self.line()
            return self.answer(line, self._items(line))
        except Exception:  # a broken configuration is told by the command itself
            return ""

    def answer(self, line: TypedLine, items: list[CompletionItem[Any]]) -> str:
        """Return items in the form in which the shell's script reads them."""
        raise NotImplementedError

    def _items(self, line: TypedLine) -> list[CompletionItem[Any]]:
        names = [os.path.basename(word) for word in line.words]
        begin = (
            names.index(self.prog_name) if self.prog_name in names else 0
        )  # behind sudo, nice...
        # As the shell would; which of them are quoted does not matter but for who has such a directory.
        words = [os.path.expandvars(os.path.expanduser(word)) for word in line.words[begin + 1 :]]
        items = self.get_completions(words, line.last)
        option, found, _ = line.last.partition("=")
        if found and line.last.startswith("-"):  # click leaves out what stands before the value
            for item in items:
                if item.type == "plain" and not str(item.value).startswith(f"{option}="):
                    item.value = f"{option}={item.value}"
        return items


class Bash(_Shell):
    """bash 4.4 and later; it replaces what is behind the last ``:`` or ``=``, and quotes nothing."""

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
    """zsh, which quotes what it inserts."""

    name = "zsh"
    source_template = _ZSH

    def answer(self, line: TypedLine, items: list[CompletionItem[Any]]) -> str:
        fields = [field for item in items for field in (_kind(item), item.value, item.help or "")]
        return "".join(f"{field}\0" for field in fields)


class Fish(_Shell):
    """fish, which quotes what it inserts, and takes a line for each name."""

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
            elif value.isprintable():  # nothing else fits on a line
                lines.append(f"+{value}" + (f"\t{item.help}" if item.help else ""))
        return "".join(f"{each}\n" for each in lines)


def _kind(item: CompletionItem[Any]) -> str:
    """Return click's type of an item; ``open`` of one to which more is to be added."""
    if item.type == "plain" and str(item.value).endswith(("/", ":")):
        return "open"
    return item.type


def script(shell: str) -> str:
    """Return what a shell has to run so that Tab completes the commands: bash, zsh or fish."""
    kind = {each.name: each for each in (Bash, Zsh, Fish)}[shell]
    return kind(Command("pipegrid"), {}, "pipegrid", COMPLETION).source()


def answer_shells() -> None:
    """Have click answer shells so."""
    for each in (Bash, Zsh, Fish):
        add_completion_class(each)
