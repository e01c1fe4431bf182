"""The parts of config.json that most families share. A family combines them and adds its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import Activation, AttentionSpec, LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.pooling.names import Purpose, purpose_of
from baton.worker.models.reading_rope import read_rope
from baton.worker.models.reading_sizes import read_head_dim, read_max_position_embeddings

# By their names in configs; several are spellings of one function.
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_OF_ALL_PARTS = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """The reader of one architecture's config."""

    architecture: str  # as in config.json
    model_type: str  # selects the family if config.json has no architectures
    read: Callable[[Fields], ModelConfig]
    ignores_auto_map: bool = False  # checkpoints refer to remote code that is no longer needed
    former_name: str = ""  # of the architecture in older checkpoints
    executors: tuple[str, ...] = ("cpu", "cuda")  # that compute it

    @property
    def generates(self) -> bool:
        """Whether its models make tokens."""
        return purpose_of(Fields({"architectures": [self.architecture]}, "")) is Purpose.GENERATE


def read_attention(fields: Fields, rope: RopeConfig | None = None) -> AttentionSpec:
    """Reads heads, and RoPE unless it is given, without biases, norms or a window."""
    num_q_heads = fields.positive_int("num_attention_heads")
    head_dim = read_head_dim(fields)
    num_kv_heads = fields.positive_int("num_key_value_heads", default=num_q_heads)
    if num_q_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_q_heads})")
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    return AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_rope(fields) if rope is None else rope,
        scale=float(head_dim) ** -0.5,
    )


def read_mlp(fields: Fields, activation: Activation | None = None) -> MlpSpec:
    """Reads a gated MLP without biases, with SiLU unless the activation is given."""
    if activation is None and fields.text("hidden_act", default="silu") != "silu":
        raise fields.error("hidden_act", "silu")
    return MlpSpec(fields.positive_int("intermediate_size"), activation=activation or "silu")


def read_activation(fields: Fields, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Reads the activation of MLPs."""
    if fields.text(key, default=default) not in _ACTIVATIONS:
        raise fields.error(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[fields.text(key, default=default)]


def read_model(
    fields: Fields,
    architecture: str,
    layers: list[LayerSpec],
    *,
    names: TensorNames = TensorNames(),  # noqa: B008 - frozen
    embedding_scale: float = 1.0,
    logits_divisor: float = 1.0,
    logits_soft_cap: float = 0.0,
    norm: NormSpec | None = None,
    default_eps: float = 1e-6,
    default_tied: bool = False,
) -> ModelConfig:
    """Reads the rest of the config around the layers."""
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        layers=tuple(layers),
        norm=norm or NormSpec(fields.positive_float("rms_norm_eps", default=default_eps)),
        max_position_embeddings=read_max_position_embeddings(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", default=default_tied),
        initializer_range=fields.positive_float("initializer_range", default=0.02),
        dtype=fields.text("dtype", default=fields.text("torch_dtype", default="")),
        eos_token_ids=_read_eos_token_ids(fields),
        names=names,
        embedding_scale=embedding_scale,
        logits_divisor=logits_divisor,
        logits_soft_cap=logits_soft_cap,
    )


def read_text_part(fields: Fields, absent: Mapping[str, Any]) -> Fields:
    """Returns the text part of a config that describes a vision tower too, with defaults for fields it leaves out."""
    text = fields.inner("text_config") or Fields({}, f"{fields.source}: text_config")
    outside = {key: fields.raw[key] for key in _OF_ALL_PARTS if fields.raw.get(key) is not None}
    return Fields({**absent, **text.raw, **outside}, text.source)


def read_num_layers(fields: Fields) -> int:
    return fields.positive_int("num_hidden_layers")


def read_windows(fields: Fields, num_layers: int, slides: Sequence[bool] | None = None) -> list[int]:
    """Reads sliding_window. It applies to the layers given by layer_types, else by `slides` (None: all)."""
    if fields.raw.get("sliding_window") is None:
        return [0] * num_layers
    window = fields.positive_int("sliding_window")
    return [window if each else 0 for each in read_slides(fields, slides or [True] * num_layers)]


def read_slides(fields: Fields, default: Sequence[bool]) -> Sequence[bool]:
    """Reads layer_types. Returns True for the layers with a window."""
    kinds, num_layers = fields.raw.get("layer_types"), len(default)
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(LAYER_TYPES):
        raise fields.error("layer_types", f"a list of {num_layers} x {' or '.join(LAYER_TYPES)}")
    return [kind == "sliding_attention" for kind in kinds]


def read_optional_windows(fields: Fields, num_layers: int, slides: Sequence[bool] | None = None) -> list[int]:
    """Reads windows that apply only with use_sliding_window, to the layers given by layer_types, else by `slides`
    (None: from max_window_layers on)."""
    if not fields.flag("use_sliding_window", default=False):
        return [0] * num_layers
    if slides is None:
        first = fields.number("max_window_layers", default=28)
        slides = [layer >= first for layer in range(num_layers)]
    return read_windows(fields, num_layers, slides)


def all_but_every(period: int, num_layers: int) -> list[bool]:
    """Returns True for the layers with a window, if every `period`-th layer has none."""
    return [layer % period != 0 for layer in range(1, num_layers + 1)]


def _read_eos_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.raw.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in listed):
        raise fields.error("eos_token_id", "an integer or a list of integers")
    return tuple(listed)
