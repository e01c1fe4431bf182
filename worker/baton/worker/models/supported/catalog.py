"""What runs: families, weight formats, KV dtypes and limits. Loads no weights and no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kernels.limits import BLOCK_SIZES, FP8_CAPABILITY, HEAD_DIMS_TEXT, MIN_CAPABILITY, WIDTH_STEP
from baton.worker.models.supported.dtypes import COMPUTE_DTYPES
from baton.worker.models.supported.families import FAMILIES, summary_of
from baton.worker.quantization.formats.table import FORMATS

EXECUTORS = ("cpu", "cuda")  # that compute a model


@dataclass(frozen=True, slots=True)
class ListedFamily:
    """A family, and the executors that compute it."""

    architecture: str
    former_name: str  # of the architecture, or empty
    model_type: str
    summary: str
    executors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListedFormat:
    """A format of weights or of KV, and the executors that take it."""

    name: str
    summary: str
    executors: tuple[str, ...]


OTHERS = (
    ListedFormat(
        "Transformers",
        "causal language models of the installed Transformers, by its layers; --model-impl transformers for all",
        EXECUTORS,
    ),
)
WEIGHT_FORMATS = (
    ListedFormat("unquantized", f"safetensors in {', '.join(COMPUTE_DTYPES)}", EXECUTORS),
    *(ListedFormat(row.quant_method, row.summary, row.executors) for row in FORMATS.values()),
)
KV_DTYPES = (
    ListedFormat("auto", "that of activations", EXECUTORS),
    ListedFormat(
        "fp8_e4m3",
        f"8 bits, with scales; on GPUs compute capability {'.'.join(map(str, FP8_CAPABILITY))} on",
        EXECUTORS,
    ),
)
LIMITS = (
    ListedFormat("device", f"compute capability {'.'.join(map(str, MIN_CAPABILITY))} on", ("cuda",)),
    ListedFormat("head_dim", "even", ("cpu",)),
    ListedFormat("head_dim", HEAD_DIMS_TEXT, ("cuda",)),
    ListedFormat("widths", f"hidden, intermediate and query sizes: multiples of {WIDTH_STEP}", ("cuda",)),
    ListedFormat("block size", "1 to 1024 tokens", ("cpu",)),
    ListedFormat("block size", f"{', '.join(map(str, BLOCK_SIZES))} tokens", ("cuda",)),
)


def families() -> list[ListedFamily]:
    """Returns all families, in the order of the registry."""
    return [
        ListedFamily(
            family.architecture,
            family.former_name,
            family.model_type,
            summary_of(family),
            family.executors,
        )
        for family in FAMILIES.values()
    ]
