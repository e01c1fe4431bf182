"""The names of a decoder's tensors in its checkpoint. The defaults are Llama's, which most architectures use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from baton.worker.quantization.expert_names import ExpertNames


class Layout(Enum):
    """How a checkpoint keeps the matrices of a layer's linears."""

    ROWS = "rows"  # [out_features, in_features]
    COLUMNS = "columns"  # [in_features, out_features]
    QKV_BY_HEAD = "qkv_by_head"  # rows; a head's queries, keys and values follow one another in a fused projection


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of the parts of multi-head latent attention that other attention does not have."""

    q: str = "self_attn.q_proj"  # of a layer whose queries have no low-rank values
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True)
class StateNames:
    """Names of the parts of layers with states. The defaults are Gated DeltaNet's in Qwen3-Next."""

    proj: tuple[str, ...] = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")
    conv: tuple[str, ...] = ("linear_attn.conv1d",)  # of its channels' parts
    log_rate: str = "linear_attn.A_log"  # with its ending
    bias: str = "linear_attn.dt_bias"  # with its ending
    skip: str = ""  # with its ending
    norm: str = "linear_attn.norm"
    o: str = "linear_attn.out_proj"
    ups: tuple[str, ...] = ()  # of linears that read parts of the first one


@dataclass(frozen=True, slots=True)
class JoinNames:
    """Names of what begins an MTP layer, whole, without ".weight"."""

    embed_norm: str
    hidden_norm: str
    proj: str


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names without ".weight" and ".bias"; names in a layer are without the layer's prefix."""

    embed: str = "model.embed_tokens"
    positions: str = ""
    token_types: str = ""
    embed_norm: str = ""
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    places: tuple[
        tuple[int, int], ...
    ] = ()  # each layer's numbers in the checkpoint, of its mixer and its MLP; (): its own
    attention_input_norm: str = "input_layernorm"
    attention_output_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one, in this order
    latent: LatentNames = LatentNames()
    states: StateNames = StateNames()
    relative: str = ""  # one table for all layers
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"  # with its ending
    mlp_input_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one, gates first
    up_first: bool = False  # the one tensor of gate_up has the gates last
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_correction: str = "mlp.gate.e_score_correction_bias"  # with its ending
    correction_is_row: bool = False  # [1, num_experts]
    experts: ExpertNames = ExpertNames()  # noqa: RUF009 - frozen
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_output_gate: str = "mlp.shared_expert_gate"
    join: JoinNames | None = None  # of an MTP layer; None: the stream begins with the tokens' embeddings
    layout: Layout = Layout.ROWS
    aliases: tuple[tuple[str, str], ...] = ()  # other beginnings of names, as (ours, theirs), in some checkpoints
    endings: tuple[tuple[str, str], ...] = ()  # other endings

    def prefixes(self, index: int) -> tuple[str, str]:
        """Returns the beginnings of the names of a layer's mixer and of its MLP."""
        mixer, mlp = self.places[index] if self.places else (index, index)
        return self.layer.format(mixer), self.layer.format(mlp)

    def of_text(self) -> TensorNames:
        """Returns the names of a model whose checkpoint holds a vision tower too."""
        text = (
            ("model.", "language_model.model."),
            ("model.", "model.language_model."),
            ("lm_head", "language_model.lm_head"),
        )
        return replace(self, aliases=(*self.aliases, *text))

    def spellings(self, name: str) -> list[str]:
        """Returns the name, and the names that other checkpoints have for it."""
        begun = [name, *(theirs + name[len(ours) :] for ours, theirs in self.aliases if name.startswith(ours))]
        ended = [
            name.removesuffix(ours) + theirs for ours, theirs in self.endings for name in begun if name.endswith(ours)
        ]
        return [*begun, *ended]
