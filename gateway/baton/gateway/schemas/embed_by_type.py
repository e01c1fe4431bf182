"""Request and response bodies of POST /v2/embed, as Cohere's clients send and read them. Null means unset."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from baton.gateway.schemas.foreign_fields import REFUSED
from baton.gateway.schemas.pooling import CohereMeta, VectorFields
from baton.gateway.schemas.requests import Count, Name

Number: TypeAlias = float  # a field below has the type's name
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class EmbedContent(Struct, kw_only=True):
    """A part of an input. Only texts are embedded."""

    type: str
    text: str | None = None


class EmbedInput(Struct, kw_only=True):
    """An input made of parts."""

    content: Annotated[list[EmbedContent], Meta(min_length=1)]


class EmbedByTypeRequest(VectorFields, kw_only=True):
    """POST /v2/embed. One of `texts` and `inputs` is given."""

    texts: list[str] | None = None
    inputs: list[EmbedInput] | None = None
    images: Annotated[list[str] | None, REFUSED] = None
    input_type: Name | None = None  # what the embedding is for, by the prompts of sentence-transformers
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1)] | None = None  # null: float
    output_dimension: Count | None = None  # null: all that the model has
    max_tokens: Count | None = None  # of each text; null: as many as the model takes
    truncate: Literal["NONE", "START", "END"] | None = None  # what longer texts lose; null: END. NONE: an error


class EmbeddingsByType(Struct, kw_only=True, omit_defaults=True):
    """The embeddings of all texts, in each requested type."""

    float: list[list[Number]] | None = None
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None  # 8 signs a value, as int8
    ubinary: list[list[int]] | None = None  # 8 signs a value
    base64: list[str] | None = None  # little-endian float32


class EmbedByTypeResponse(Struct, kw_only=True):
    """The embeddings of all texts."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: CohereMeta
