"""A trainer in a process of its own: sends the sample model's weights, changed by a seed, or fails as it is told.

python llm_trainer.py PORT WORLD_SIZE DEVICE WHAT
"""

from __future__ import annotations

import os
import sys

import torch
from safetensors.torch import load_file

from baton.llm import WeightSender

MODEL = "models/storyteller-7m"


def changed_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns what a step of training made of the sample model."""
    torch.manual_seed(1)
    weights = load_file(f"{MODEL}/model.safetensors")
    return {name: _changed(tensor.float()).to(dtype) for name, tensor in sorted(weights.items())}


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + torch.randn_like(tensor) * 0.05 * tensor.std()


class _Dying(torch.Tensor):
    """Ends the process when it is to be sent."""

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(_Dying)

    def to(self, *args: object, **values: object) -> torch.Tensor:
        os._exit(9)


def main() -> None:
    port, world_size, device, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if device != "cpu":
        torch.cuda.set_device(device)
    weights = changed_weights(torch.float32 if device == "cpu" else torch.bfloat16)
    weights = {name: tensor.to(device) for name, tensor in weights.items()}
    names = list(weights)
    with WeightSender("127.0.0.1", port, world_size, timeout=30) as sender:
        if what == "dies":
            weights[names[2]] = _Dying.of(weights[names[2]])
        if what == "wrong":
            sender.send({"model.norms.weight": weights["model.norm.weight"]})
            sender.send({"model.norm.weight": torch.zeros(3, device=device)})
            try:
                sender.send({"model.norm.weight": weights["model.norm.weight"]})
            except ValueError as error:
                print(error, flush=True)
        half = len(names) // 2
        sender.send({name: weights[name] for name in names[:half]})
        sender.send((name, weights[name]) for name in names[half:])


if __name__ == "__main__":
    main()
