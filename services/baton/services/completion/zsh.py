"""The completion script of zsh."""

from __future__ import annotations

from collections.abc import Sequence

from baton.services.completion.words import CommandWords, Flag

_HEAD = """#compdef baton
# zsh completion of baton: source <(baton completion zsh), after compinit
_baton() {
  local -a commands=(
%s  )
  if (( CURRENT == 2 )); then
    _describe -t commands command commands
    return
  fi
  local command=$words[2] nested=
"""
_TAIL = """compdef _baton baton
"""


def script(commands: Sequence[CommandWords]) -> str:
    """Returns the script that `source <(baton completion zsh)` reads."""
    top = [command for command in commands if len(command.words) == 1]
    rows = [f"    {_quoted(command.name + ':' + command.summary.replace(':', ' '))}\n" for command in top]
    parts = [_HEAD % "".join(rows)]
    for command in commands:
        if command.nested:
            names = " ".join(command.nested)
            parts.append(
                f"  if [[ $command == {command.name} ]]; then\n"
                f"    if (( CURRENT == 3 )) && [[ $PREFIX != -* ]]; then compadd {names}; return; fi\n"
                f'    if [[ " {names} " == *" $words[3] "* ]]; then nested=" $words[3]"; fi\n'
                "  fi\n"
            )
    # Without it, _arguments would take the command itself for the program's first operand.
    parts.append("  shift words; (( CURRENT-- ))\n  [[ -n $nested ]] && { shift words; (( CURRENT-- )) }\n")
    parts += ['  case "$command$nested" in\n', *(_case(command) for command in commands), "  esac\n}\n", _TAIL]
    return "".join(parts)


def _case(command: CommandWords) -> str:
    specs = "".join(f" \\\n        {_quoted(spec)}" for flag in command.flags for spec in _specs(flag))
    return f'    "{command.name}")\n      _arguments{specs} \\\n        "*:operand:_files" ;;\n'


def _specs(flag: Flag) -> list[str]:
    text = flag.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    return [f"{name}[{text}]{_value(flag)}" for name in (flag.name, flag.short) if name]


def _value(flag: Flag) -> str:
    if not flag.takes_value:
        return ""
    if flag.values:
        return f":value:({' '.join(flag.values)})"
    if flag.takes_folders:
        return ":folder:_files -/"
    return ":file:_files" if flag.takes_files else ":value: "


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
