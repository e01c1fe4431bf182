"""Device constants from what `baton bench engine` measured: those whose sums over a row's steps fit its seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.cluster.device import DeviceModel

_DEFAULT_BUDGET = 8192

Floats = NDArray[np.float64]


def read_device(path: Path, model: str, device: DeviceModel) -> DeviceModel:
    """Returns `device` with a measured model's step times; empty: the file's first model. Raises InvalidRequest."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        engines = document["engines"]
        rows = [(row, engine["config"]) for engine in engines for row in engine["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{path} is no output of `baton bench engine --json`: {type(error).__name__} {error}", field="calibration"
        ) from error
    models = list(dict.fromkeys(row["model"] for row, _ in rows))
    wanted = model or (models[0] if models else "")
    chosen = [pair for pair in rows if pair[0]["model"] == wanted]
    if len(chosen) < 3:
        raise InvalidRequest(
            f"{path} has {len(chosen)} rows of model {wanted!r}, at least 3 are needed; it has models"
            f" {', '.join(models) or 'none'}",
            field="calibration_model",
        )
    base, per_prefill_token, per_prefill_pair, per_decode_request, per_context_token = fit(chosen)
    return replace(
        device,
        base=base,
        per_prefill_token=per_prefill_token,
        per_prefill_pair=per_prefill_pair,
        per_decode_request=per_decode_request,
        per_context_token=per_context_token,
    )


def fit(rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[float]:
    """Fits the constants in the order of DeviceModel, none negative, by least squares of relative errors."""
    features = np.array(
        [_features(row, int(config.get("max_num_batched_tokens", _DEFAULT_BUDGET))) for row, config in rows]
    )
    seconds = np.array([float(row["seconds"]) for row, _ in rows])
    values = _non_negative(features / seconds[:, None], np.ones(len(seconds)))
    return [float(value) for value in values]


def _features(row: Mapping[str, Any], budget: int) -> list[float]:
    """Returns steps, prompt tokens, pairs of them, decoded tokens and their context, of an offline run of the row."""
    count, own, shared, output = (int(row[name]) for name in ("num_requests", "num_own", "num_shared", "num_output"))
    prompt = shared + own
    tokens = shared + count * own
    pairs = shared * shared / 2 + count * own * (shared + own / 2)
    decodes = count * (output - 1)
    num_steps = max(1.0, tokens / budget) + output - 1
    return [num_steps, float(tokens), pairs, float(decodes), decodes * (prompt + output / 2)]


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """Returns non-negative least squares (an active set)."""
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    active = list(range(matrix.shape[1]))
    while active:
        solution, *_ = np.linalg.lstsq(matrix[:, active] / scale[active], target, rcond=None)
        if (solution >= 0).all():
            values = np.zeros(matrix.shape[1])
            values[active] = solution / scale[active]
            return values
        del active[int(np.argmin(solution))]
    return np.zeros(matrix.shape[1])
