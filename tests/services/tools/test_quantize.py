"""`baton quantize`: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.services import cli

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"


@pytest.fixture
def ask(capsys):
    def run(*words):
        code = cli.main(["quantize", *map(str, words)], {})
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_folder_is_written_and_what_it_took_is_printed(ask, tmp_path):
    out = tmp_path / "new" / "model"
    code, printed, errors = ask(SAMPLE, out, "--format", "w4a16", "--group-size", "64", "--ignore", "layers.7.mlp")
    assert (code, errors) == (0, "")
    assert printed.startswith(f"{out}\n  format     w4a16: 4-bit integers in groups\n  packed     53 linears, without ")
    assert "13.3 MiB before, 5.8 MiB now" in printed
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    assert (out / "tokenizer.json").read_bytes() == (SAMPLE / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "w4a16"), "model.layers.0.mlp.down_proj: 704 input features are no multiple of the group size"),
        (("--format", "fp8", "--group-size", "64"), "--group-size=64: fp8 has no choice of it"),
        (("--format", "gptq", "--calibrate", "/none.txt"), "--calibrate=/none.txt: No such file or directory"),
        (("--format", "fp8", "--calibrate", __file__), "--calibrate: fp8 is rounded to the nearest alone"),
        (("--format", "fp8", "--ignore", "k_projj"), "--ignore=k_projj: it names no linear of the model"),
    ],
)
def test_what_is_refused_is_named_as_the_flag(ask, words, message, tmp_path):
    code, printed, errors = ask(SAMPLE, tmp_path / "out", *words)
    assert (code, printed) == (1, "")
    assert errors.startswith(f"baton quantize: {message}")


def test_a_model_that_is_not_there_is_named(ask, tmp_path):
    code, _, errors = ask(tmp_path / "none", tmp_path / "out", "--format", "fp8")
    assert code == 1
    assert errors.startswith(f"baton quantize: MODEL: '{tmp_path / 'none'}' is no folder")
    (tmp_path / "file").write_text("")
    code, _, errors = ask(SAMPLE, tmp_path / "file" / "out", "--format", "fp8")
    assert code == 1
    assert "file/out cannot be made: " in errors
