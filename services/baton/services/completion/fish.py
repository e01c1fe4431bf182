"""The completion script of fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.services.completion.words import CommandWords, Flag

_HEAD = """# fish completion of baton: baton completion fish | source
function __baton_is
    set -l words (commandline -opc)
    test (count $words) -gt (count $argv); or return 1
    for i in (seq (count $argv))
        test $words[(math $i + 1)] = $argv[$i]; or return 1
    end
end
function __baton_ends
    set -l words (commandline -opc)
    test (count $words) -eq (math (count $argv) + 1); and __baton_is $argv
end
complete -c baton -n 'test (count (commandline -opc)) -eq 1' -f
"""


def script(commands: Sequence[CommandWords]) -> str:
    """Returns the script that `baton completion fish | source` reads."""
    lines = [_HEAD]
    for command in commands:
        if len(command.words) == 1:
            one = f"-a {command.name} -d {_quoted(command.summary)}"
            lines.append(f"complete -c baton -n 'test (count (commandline -opc)) -eq 1' {one}\n")
        if command.nested:
            lines.append(f"complete -c baton -n '__baton_ends {command.name}' -f -a '{' '.join(command.nested)}'\n")
        lines += [f"complete -c baton -n '__baton_is {command.name}' {words}\n" for words in _flags(command.flags)]
    return "".join(lines)


def _flags(flags: Sequence[Flag]) -> Iterator[str]:
    for flag in flags:
        short = f" -s {flag.short.removeprefix('-')}" if flag.short else ""
        yield f"-l {flag.name.removeprefix('--')}{short}{_value(flag)} -d {_quoted(flag.help)}"


def _value(flag: Flag) -> str:
    if not flag.takes_value:
        return ""
    if flag.values:
        return f" -x -a '{' '.join(flag.values)}'"
    if flag.takes_folders:
        return " -x -a '(__fish_complete_directories)'"
    return " -r -F" if flag.takes_files else " -x"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
