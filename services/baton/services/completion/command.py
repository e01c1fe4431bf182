"""`baton completion SHELL`: prints a script by which a shell completes commands, flags and values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from baton.services.completion import bash, fish, zsh
from baton.services.completion.words import CommandTable, CommandWords, Run, described

EXIT_OK = 0
EXIT_MISUSED = 2

_SCRIPTS: Mapping[str, Callable[[Sequence[CommandWords]], str]] = {
    "bash": bash.script,
    "zsh": zsh.script,
    "fish": fish.script,
}
_USAGE = """usage: baton completion {bash,zsh,fish}

Prints a script that completes commands, flags and values. For every new shell:
  bash   echo 'source <(baton completion bash)' >> ~/.bashrc
  zsh    echo 'source <(baton completion zsh)' >> ~/.zshrc
  fish   baton completion fish > ~/.config/fish/completions/baton.fish"""


def main(argv: Sequence[str], table: CommandTable, run: Run) -> int:
    """Prints the script. `run` is the command line itself. Returns the exit code."""
    if argv and argv[0] in ("--help", "-h", "help"):
        print(_USAGE)
        return EXIT_OK
    if len(argv) != 1 or argv[0] not in _SCRIPTS:
        print(
            f"baton completion: give one of {', '.join(_SCRIPTS)}, got {' '.join(argv) or 'nothing'}", file=sys.stderr
        )
        return EXIT_MISUSED
    print(_SCRIPTS[argv[0]](list(described(table, run))), end="")
    return EXIT_OK
