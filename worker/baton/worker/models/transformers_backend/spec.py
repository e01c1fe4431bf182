"""How a model of Transformers runs over Baton's KV cache. Data only; imports neither torch nor Transformers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformersSpec:
    """A causal language model of the installed Transformers."""

    class_name: str
    raw_config: str  # config.json as canonical JSON, without what changes no result
    body: str  # name of the module that returns the hidden states for the head
    attentions: tuple[str, ...]  # names of the modules that attend, in the order of the layers
    num_weights: int  # elements of all parameters and buffers
    version: str  # of Transformers
    reads_values: bool = False  # the forward pass copies values to the host, so that no CUDA graph can hold it
    sinks: tuple[str, ...] = ()  # names of the layers' sinks, if they have some

    def num_bytes(self, itemsize: int) -> int:
        """Size of all tensors, with values of `itemsize` bytes."""
        return self.num_weights * itemsize
