"""Sizes that several parts of a model are read with."""

from __future__ import annotations

from baton.worker.models.fields import Fields


def read_head_dim(fields: Fields) -> int:
    """Reads the size of an attention head."""
    num_q_heads = fields.positive_int("num_attention_heads")
    return fields.positive_int("head_dim", default=fields.positive_int("hidden_size") // num_q_heads)


def read_max_position_embeddings(fields: Fields) -> int:
    """Reads the length that the model was made for."""
    return fields.positive_int("max_position_embeddings", default=2048)
