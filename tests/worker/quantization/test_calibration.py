"""Rounding that a text calibrates: what AutoRound chooses is what the folder means, and it costs less than rounding."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.packed.unpacked import UNPACK
from transformers import AutoModelForCausalLM

from baton.llm import LLM, SamplingParams
from baton.rpc.errors import InvalidRequest
from baton.services import cli
from baton.worker.weights.quantizing.auto_round import AutoRoundCalibration
from baton.worker.weights.quantizing.integer_scheme import IntegerScheme
from baton.worker.weights.quantizing.integers import Integers
from baton.worker.weights.quantizing.quantize import quantize
from baton.worker.weights.quantizing.scheme import scheme_of

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
TEXT = "Once upon a time, a girl and a dog found a red ball near the old tree. " * 20
WITH_AUTO_ROUND = pytest.mark.skipif(find_spec("auto_round") is None, reason="needs baton-inference[calibrate]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model's first two layers."""
    out = tmp_path_factory.mktemp("model") / "two"
    shutil.copytree(SAMPLE, out)
    config = json.loads((out / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(out / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not any(f".layers.{layer}." in name for layer in range(2, 8))}
    (out / "model.safetensors").unlink()
    save_file(kept, out / "model.safetensors", {"format": "pt"})
    return out


@dataclass
class Recorded:
    """A calibration whose choice is kept."""

    inner: AutoRoundCalibration
    made: dict[str, Integers] = field(default_factory=dict)

    def integers_of(self, linears: Sequence[str], scheme: IntegerScheme) -> Mapping[str, Integers]:
        self.made = dict(self.inner.integers_of(linears, scheme))
        return self.made


@WITH_AUTO_ROUND
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym", "w8a16", "gptq", "awq"])
def test_the_folder_means_what_was_chosen_and_others_stay(name: str, folder: Path, tmp_path: Path) -> None:
    chosen = Recorded(AutoRoundCalibration(folder, TEXT, window=64, steps=10))
    ignore = ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj")
    quantize(folder, tmp_path / "out", scheme_of(name, 64), ignore, calibration=chosen)
    tensors, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert len(chosen.made) == 12
    moved = 0
    for linear, made in chosen.made.items():
        own = {key.removeprefix(linear): one for key, one in tensors.items() if key.startswith(f"{linear}.")}
        meant = torch.from_numpy(UNPACK[name]({key: one for key, one in own.items() if key != ".bias"}).weight).float()
        assert torch.allclose(meant, made.weight, rtol=1e-5, atol=1e-7), linear
        weight = before[f"{linear}.weight"].float()
        steps = (meant - weight).unflatten(1, (-1, 64)).abs() / made.scale.abs().unsqueeze(2)
        moved += int((steps > 0.51).sum())
        assert float((meant - weight).norm() / weight.norm()) < 0.2, linear
    assert moved or name == "w8a16", "some weights are rounded to another number than the nearest"
    for linear in ignore:
        assert torch.equal(tensors[f"model.{linear}.weight"], before[f"model.{linear}.weight"])


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two texts of the sample model: one to calibrate with, another to compare on."""
    params = [SamplingParams(temperature=1.0, max_tokens=256, seed=seed) for seed in range(24)]
    with LLM(str(SAMPLE)) as llm:
        outputs = llm.generate(["Once upon a time"] * len(params), params, use_tqdm=False)
    texts = [f"{output.prompt}{output.outputs[0].text}" for output in outputs]
    folder = tmp_path_factory.mktemp("texts")
    for name, part in (("calibrate", texts[:14]), ("compare", texts[14:])):
        (folder / f"{name}.txt").write_text("\n\n".join(part))
    return folder / "calibrate.txt", folder / "compare.txt"


@WITH_AUTO_ROUND
@pytest.mark.filterwarnings("ignore")
def test_the_sample_model_loses_less_than_by_rounding_to_the_nearest(
    stories: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate, compare = stories
    found = {}
    for name, words in (("nearest", ()), ("tuned", ("--calibrate", calibrate, "--calibration-steps", 12))):
        out = tmp_path / name
        more = ("--group-size", 64, *words, *(("--calibration-window", 128) if words else ()))
        assert cli.main(["quantize", *map(str, (SAMPLE, out, "--format", "w4a16", *more))], {}) == 0
        report = tmp_path / f"{name}.json"
        asked = ("--model", out, "--reference", SAMPLE, "--text", compare, "--json", report)
        assert cli.main(["eval", *map(str, asked)], {}) == 0
        found[name] = json.loads(report.read_text())
    capsys.readouterr()
    tuned, nearest = (found[name]["comparison"]["mean_kl"] for name in ("tuned", "nearest"))
    assert tuned < 0.7 * nearest
    assert found["tuned"]["perplexity"] <= found["nearest"]["perplexity"]


def test_formats_that_are_not_of_integers_in_groups_are_refused(folder: Path, tmp_path: Path) -> None:
    calibration = AutoRoundCalibration(folder, TEXT)
    with pytest.raises(InvalidRequest, match=r"calibrate: fp8 is rounded to the nearest alone; .*: gptq, awq, w4a16"):
        quantize(folder, tmp_path / "out", scheme_of("fp8"), calibration=calibration)
    assert not (tmp_path / "out").exists()


def test_without_the_package_the_error_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "auto_round", None)
    with pytest.raises(
        InvalidRequest, match=r'auto_round is not installed; pip install "baton-inference\[calibrate\]"'
    ):
        quantize(folder, tmp_path / "out", scheme_of("gptq", 64), calibration=AutoRoundCalibration(folder, TEXT))
    assert not (tmp_path / "out").exists()


@WITH_AUTO_ROUND
def test_a_text_of_less_than_a_window_is_refused_with_its_length(folder: Path, tmp_path: Path) -> None:
    calibration = AutoRoundCalibration(folder, "Once upon a time")
    with pytest.raises(InvalidRequest, match=r"calibrate: the text has \d tokens, which are no window of 512"):
        quantize(folder, tmp_path / "out", scheme_of("gptq", 64), calibration=calibration)


def test_a_damaged_weight_is_named_before_the_model_runs(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    model = AutoModelForCausalLM.from_pretrained(damaged)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(damaged)
    with pytest.raises(InvalidRequest, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 values that are not finite"):
        quantize(damaged, tmp_path / "out", scheme_of("gptq", 64), calibration=AutoRoundCalibration(damaged, TEXT))
