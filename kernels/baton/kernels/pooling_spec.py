"""What poolers do with hidden states and with vectors, by name."""

from __future__ import annotations

from typing import Literal

Pick = Literal["first", "last", "mean", "max"]
PICKS: tuple[Pick, ...] = ("first", "last", "mean", "max")
Activation = Literal["none", "normalize", "sigmoid", "softmax"]
ACTIVATIONS: tuple[Activation, ...] = ("none", "normalize", "sigmoid", "softmax")
SMALLEST_NORM = 1e-12  # as torch.nn.functional.normalize
