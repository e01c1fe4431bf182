"""Buckets of distances equal those of Transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from baton.rpc.errors import InvalidRequest
from baton.worker.layers.relative import distance_buckets
from baton.worker.models.registry import parse_config


@pytest.mark.parametrize("num_positions", [1, 2, 9, 130, 700])
def test_every_distance_has_the_bucket_of_transformers(num_positions: int) -> None:
    distances = torch.arange(1 - num_positions, num_positions)
    expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=32)
    assert distance_buckets(32, num_positions).tolist() == expected.tolist()


def test_other_numbers_of_buckets_are_refused() -> None:
    raw = {"architectures": ["MPNetModel"], "vocab_size": 9, "hidden_size": 32, "intermediate_size": 32,
           "num_hidden_layers": 1, "num_attention_heads": 2, "relative_attention_num_buckets": 16}  # fmt: skip
    with pytest.raises(InvalidRequest, match="relative_attention_num_buckets"):
        parse_config(raw, "mpnet")
