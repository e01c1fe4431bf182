"""Calibration by AutoRound, which tunes the rounding and the range of each block of layers to its outputs on a text.

W. Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", EMNLP 2024. The
package `auto-round` runs the model of Transformers; what it chooses is packed by our formats.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baton.rpc.errors import InvalidRequest
from baton.worker.weights.quantizing import numbers
from baton.worker.weights.quantizing.integer_scheme import IntegerScheme
from baton.worker.weights.quantizing.integers import Integers

_MOST_WINDOWS = 512  # of the text
_BATCH = 8  # windows of one step of the tuning
_OFF_GRID = 0.25  # of a scale: weights are returned in the dtype of the model


@dataclass(frozen=True, slots=True)
class AutoRoundCalibration:
    """Implements Calibration."""

    folder: Path  # of the unquantized model
    text: str
    window: int = 512  # tokens that the model reads together
    steps: int = 200  # of the tuning of each block of layers

    def integers_of(self, linears: Sequence[str], scheme: IntegerScheme) -> Mapping[str, Integers]:
        with torch.inference_mode(False), torch.enable_grad():
            modules = dict(self._tuned(linears, scheme).named_modules())
        return {name: _integers(name, modules[name], scheme) for name in linears}

    def _tuned(self, linears: Sequence[str], scheme: IntegerScheme) -> nn.Module:
        """Returns the model with weights on the grids that AutoRound chose."""
        auto_round, transformers = _packages()
        local = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, **local)
        windows = self._windows(tokenizer)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        stored = transformers.AutoConfig.from_pretrained(self.folder, **local).dtype or torch.float32
        dtype = stored if device == "cuda" else torch.float32
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, use_safetensors=True, **local
        )
        tuned: nn.Module
        tuned, _ = auto_round.AutoRound(
            model,
            tokenizer,
            bits=scheme.bits,
            group_size=scheme.group,
            sym=not scheme.has_zeros,
            scale_dtype=scheme.scale_dtype(stored),
            layer_config=_left_out(model, linears),
            iters=self.steps,
            dataset=windows,
            nsamples=len(windows),
            seqlen=self.window,
            batch_size=min(_BATCH, len(windows)),
            device_map=device,
            amp=device == "cuda",
            enable_torch_compile=False,
        ).quantize()
        return tuned

    def _windows(self, tokenizer: Any) -> list[dict[str, Tensor]]:
        ids = tokenizer(self.text, return_tensors="pt", verbose=False)["input_ids"]
        count = min(ids.shape[1] // self.window, _MOST_WINDOWS)
        if not count:
            raise InvalidRequest(
                f"calibrate: the text has {ids.shape[1]} tokens, which are no window of {self.window}; give a longer "
                "one, or a smaller --calibration-window",
                field="calibrate",
            )
        parts = ids[0, : count * self.window].view(count, 1, self.window)
        return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]


def _packages() -> tuple[Any, Any]:
    try:
        import auto_round
        import transformers
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f'calibrate: the package {error.name} is not installed; pip install "baton-inference[calibrate]"',
            field="calibrate",
        ) from error
    logging.getLogger("autoround").setLevel(logging.ERROR)
    return auto_round, transformers


def _left_out(model: nn.Module, linears: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns AutoRound's settings of the linears that stay. Raises InvalidRequest if one to be packed is not there."""
    found = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if missing := [name for name in linears if name not in found]:
        raise InvalidRequest(
            f"calibrate: Transformers has no linear {missing[0]}, one of {len(missing)} that the checkpoint names (it "
            "stacks experts); leave these out with --ignore, or round to the nearest, without --calibrate",
            field="calibrate",
        )
    return {name: {"bits": 16, "data_type": "float"} for name in sorted(found - set(linears))}


def _integers(name: str, module: Any, scheme: IntegerScheme) -> Integers:
    """Returns the integers of a tuned linear, whose weight lies on the grid of its scales and zeros."""
    weight, most = module.weight.detach().float().cpu(), (1 << scheme.bits) - 1
    scale = module.scale.float().view(len(weight), -1)
    zero = module.zp if scheme.has_zeros else 1 << (scheme.bits - 1)
    zero = torch.as_tensor(zero).float().expand_as(scale).contiguous()
    values = numbers.grouped(weight, scheme.group)
    stored = numbers.rounded(values, scale.unsqueeze(2), 0, most, zero.unsqueeze(2))
    made = Integers(stored.flatten(1), scale, zero)
    off = (numbers.grouped(made.weight - weight, scheme.group).abs() / scale.abs().unsqueeze(2)).max()
    if not float(off) <= _OFF_GRID:
        raise InvalidRequest(
            f"calibrate: AutoRound returned {name} at {float(off):.2f} scales from its own grid; give the release that "
            "baton-inference[calibrate] names",
            field="calibrate",
        )
    return made
