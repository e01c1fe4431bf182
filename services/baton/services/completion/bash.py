"""The completion script of bash."""

from __future__ import annotations

from collections.abc import Sequence

from baton.services.completion.words import CommandWords, Flag

_HEAD = """# bash completion of baton: source <(baton completion bash)
_baton() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} nested= flags=
  # `--flag=value` comes as three words.
  if [[ $current == "=" ]]; then current=
  elif [[ $previous == "=" ]]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi
  COMPREPLY=()
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W "%s" -- "$current"))
    return
  fi
"""
_TAIL = """  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
  elif (( COMP_CWORD == 2 )) && [[ -n $nested ]]; then
    COMPREPLY=($(compgen -W "$nested" -- "$current"))
  else
    compopt -o default
  fi
}
complete -F _baton baton
"""


def script(commands: Sequence[CommandWords]) -> str:
    """Returns the script that `source <(baton completion bash)` reads."""
    names = [command.name for command in commands if len(command.words) == 1]
    parts = [_HEAD % " ".join(names), _nested(commands)]
    parts += ['  case "$command" in\n', *(_case(command) for command in commands), "  esac\n", _TAIL]
    return "".join(parts)


def _nested(commands: Sequence[CommandWords]) -> str:
    """Makes `keys create` one command, where there is such a one."""
    lines = [
        f'  if [[ $command == {command.name} ]] && (( COMP_CWORD > 2 )) && [[ " {" ".join(command.nested)} " == '
        f'*" ${{COMP_WORDS[2]}} "* ]]; then command="$command ${{COMP_WORDS[2]}}"; fi\n'
        for command in commands
        if command.nested
    ]
    return "".join(lines)


def _case(command: CommandWords) -> str:
    lines = [f'    "{command.name}")\n']
    if command.nested:
        lines.append(f'      nested="{" ".join(command.nested)}"\n')
    lines.append(f'      flags="{" ".join(word for flag in command.flags for word in _names(flag))}"\n')
    values = [line for flag in command.flags if (line := _values(flag))]
    if values:
        lines += ['      case "$previous" in\n', *values, "      esac\n"]
    return "".join([*lines, "      ;;\n"])


def _names(flag: Flag) -> list[str]:
    return [flag.name, *([flag.short] if flag.short else [])]


def _values(flag: Flag) -> str:
    if not flag.takes_value:
        return ""
    if flag.values:
        action = f'COMPREPLY=($(compgen -W "{" ".join(flag.values)}" -- "$current")); return'
    elif flag.takes_folders:
        action = 'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$current"); return'
    elif flag.takes_files:
        action = "compopt -o default; return"
    else:
        action = "return"
    return f"        {'|'.join(_names(flag))}) {action} ;;\n"
