"""Completion scripts in the shells that they are for."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.terminal import Terminal

from baton.services import cli


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of each shell's script."""
    folder = tmp_path_factory.mktemp("scripts")
    made = {}
    for shell in cli.NESTED["completion"]:
        with pytest.MonkeyPatch.context() as patch:
            path = folder / shell
            with path.open("w") as file:
                patch.setattr("sys.stdout", file)
                assert cli.main(["completion", shell], {}) == 0
        made[shell] = path
    return made


def bash(script: Path, line: str, folder: Path | None = None) -> list[str]:
    """Returns what bash offers at the end of the line."""
    # As bash splits them: `=` is a word.
    words = [part for word in shlex.split(line) for part in word.replace("=", " = ").split()]
    words += [""] if line.endswith((" ", "=")) else []
    program = (
        f"source {script}; compopt() {{ :; }}; COMP_WORDS=({' '.join(map(shlex.quote, words))}); "
        f"COMP_CWORD={len(words) - 1}; _baton; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def fish(script: Path, line: str) -> list[str]:
    program = f"source {script}; complete -C {shlex.quote(line)}"
    done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
    return [row.partition("\t")[0] for row in done.stdout.splitlines()]


SHELLS = [
    pytest.param(bash, id="bash"),
    pytest.param(fish, id="fish", marks=pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")),
]


@pytest.mark.parametrize("offers", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("baton ser", ["serve"]),
        ("baton keys ", ["create", "list", "revoke", "tenants"]),
        ("baton keys revoke --api", ["--api-keys"]),
        ("baton serve --executor ", ["auto", "cpu", "cuda", "sim"]),
        ("baton serve m --executor cu", ["cuda"]),
        ("baton serve --kv-cache-d", ["--kv-cache-dtype"]),
        ("baton serve --max-logp", ["--max-logprobs"]),
        ("baton worker --no-cuda", ["--no-cuda-graphs"]),
        ("baton doctor worker --num-b", ["--num-blocks"]),
        ("baton chat --qu", ["--quick"]),
        ("baton completion ", ["bash", "fish", "zsh"]),
        ("baton serve --num-blocks ", []),
        ("baton serve --worker-i", []),
    ],
)
def test_commands_flags_and_values_are_offered(scripts, offers, line, expected):
    assert sorted(offers(scripts[offers.__name__], line)) == expected


def test_bash_completes_values_behind_an_equals_sign_and_folders(scripts, tmp_path):
    assert bash(scripts["bash"], "baton serve --executor=cu") == ["cuda"]
    assert bash(scripts["bash"], "baton serve --executor=") == ["auto", "cpu", "cuda", "sim"]
    (tmp_path / "my logs").mkdir()
    (tmp_path / "my file").touch()
    assert bash(scripts["bash"], "baton serve --log-dir my", tmp_path) == ["my logs"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_completes_flags_and_values(scripts, tmp_path):
    shell = Terminal("-f", "-i", environ={"TERM": "xterm", "PS1": "ready> ", "HOME": str(tmp_path)}, program=("zsh",))
    try:
        shell.until("ready> ")
        shell.press(f"autoload -Uz compinit; compinit -u -d {tmp_path}/dump; source {scripts['zsh']}; echo lo''aded\n")
        shell.until("loaded")
        for typed, offered in (
            ("baton ser\t", "baton serve "),
            ("baton serve --kv-cache-dt\t", "--kv-cache-dtype "),
            ("baton serve m --executor cu\t", "--executor cuda "),
            ("baton keys rev\t", "keys revoke "),
            ("baton keys revoke --api-k\t", "--api-keys "),
        ):
            shell.press(typed)
            shell.until(offered)
            shell.press("\x15")
    finally:
        shell.close()


@pytest.mark.parametrize("shell", cli.NESTED["completion"])
def test_every_command_is_in_every_script(scripts, shell):
    text = scripts[shell].read_text()
    assert all(name in text for name in (*cli.SERVICES, *cli.TOOLS))
    assert not [line for line in text.splitlines() if line.endswith(" ") or "\t" in line]


@pytest.mark.parametrize(("words", "said"), [((), "got nothing"), (("tcsh",), "got tcsh"), (("bash", "x"), "bash x")])
def test_another_shell_is_refused(capsys, words, said):
    assert cli.main(["completion", *words], {}) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("baton completion: give one of bash, zsh, fish, got ")
    assert said in printed


def test_help_says_how_to_install_it(capsys):
    assert cli.main(["completion", "--help"], {}) == 0
    assert "source <(baton completion bash)" in capsys.readouterr().out


def test_a_shell_reads_the_script_without_the_packages_of_a_service(tmp_path):
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\", name='msgspec')")
    done = subprocess.run(
        [sys.executable, "-m", "baton.services.cli", "completion", "bash"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert '"worker")' in done.stdout
