"""The RoPE of a GGUF file as config.json has it, from its metadata and the tensors that hold factors."""

from __future__ import annotations

import math
import sys
from array import array
from pathlib import Path
from typing import Any

from baton.model_folder.gguf.fields import Reader
from baton.model_folder.gguf.header import GgufHeader, GgufTensor
from baton.rpc.errors import InvalidRequest

_FACTORS = "rope_freqs.weight"  # divisors of the frequencies of the rotated pairs
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
CONSTANTS = (_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)  # tensors that the config describes
_F32 = 0
_ATTENTION_FACTOR = "rope.scaling.attn_factor"
_ORIGINAL_LENGTH = "rope.scaling.original_context_length"


def rope_of(header: GgufHeader, reader: Reader, *, partial: bool, longrope_scales: tuple[str, ...]) -> dict[str, Any]:
    """Returns rope_parameters. `partial`: a part of each head may be rotated. `longrope_scales`: the fields for what
    longrope scales attention by."""
    rotated = reader.count("rope.dimension_count", default=reader.head_dim)
    if rotated > reader.head_dim or (rotated < reader.head_dim and not partial):
        allowed = f"the size of a head ({reader.head_dim})"
        raise reader.metadata.error(reader.key("rope.dimension_count"), f"at most {allowed}" if partial else allowed)
    parameters = {
        "rope_theta": reader.number("rope.freq_base", default=10000.0),
        **_scaling(header, reader, rotated, longrope_scales),
    }
    if rotated < reader.head_dim:
        parameters["partial_rotary_factor"] = rotated / reader.head_dim
    return {"rope_parameters": parameters}


def _scaling(header: GgufHeader, reader: Reader, rotated: int, longrope_scales: tuple[str, ...]) -> dict[str, Any]:
    key = reader.key("rope.scaling.type")
    kind = reader.metadata.text(key, default="none")
    if _LONG_FACTORS in header.tensors and _SHORT_FACTORS in header.tensors:
        return _longrope(header, reader, rotated, longrope_scales)
    if _FACTORS in header.tensors:
        return _divided(_factors(header.tensors[_FACTORS], rotated), reader.count("context_length"))
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise reader.metadata.error(key, "none, linear or yarn")
    factor = reader.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    _check_attention_factor(reader, factor)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": reader.count(_ORIGINAL_LENGTH),
        "beta_fast": reader.number("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": reader.number("rope.scaling.yarn_beta_slow", default=1.0),
    }


def _check_attention_factor(reader: Reader, factor: float) -> None:
    """Raises InvalidRequest for a factor of YaRN other than that of its paper. Files state that, or 1."""
    usual = 0.1 * math.log(factor) + 1.0
    found = reader.number(_ATTENTION_FACTOR, default=1.0)
    if not any(math.isclose(found, each, rel_tol=1e-4) for each in (1.0, usual)):
        raise reader.metadata.error(reader.key(_ATTENTION_FACTOR), f"1, or {usual:g} for a factor of {factor:g}")


def _longrope(header: GgufHeader, reader: Reader, rotated: int, scales: tuple[str, ...]) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": _factors(header.tensors[_SHORT_FACTORS], rotated),
        "long_factor": _factors(header.tensors[_LONG_FACTORS], rotated),
        **dict.fromkeys(scales, reader.number(_ATTENTION_FACTOR, default=1.0)),
        "original_max_position_embeddings": reader.count(_ORIGINAL_LENGTH),
    }


def _divided(factors: list[float], context: int) -> dict[str, Any]:
    """Returns the scaling of Llama 3, whose file divides each frequency by its own factor, as longrope does."""
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _factors(tensor: GgufTensor, rotated: int) -> list[float]:
    if tensor.type_number != _F32 or tensor.shape != (rotated // 2,):
        raise InvalidRequest(
            f"{tensor.path}: {tensor.name} has type {tensor.type_number} and shape {list(tensor.shape)};"
            f" it must be F32 {[rotated // 2]}",
            field="model",
        )
    return _read_floats(tensor.path, tensor.start, rotated // 2)


def _read_floats(path: Path, start: int, count: int) -> list[float]:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(4 * count)
    if len(data) < 4 * count:
        raise InvalidRequest(f"{path} is truncated; download or copy it again", field="model")
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
