"""The names of a decoder's tensors in its checkpoint. The defaults are Llama's, which most architectures use."""

from __future__ import annotations

from dataclasses import dataclass

from baton.worker.quantization.experts import ExpertNames


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names without ".weight" and ".bias"; names in a layer are without the layer's prefix."""

    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    attention_input_norm: str = "input_layernorm"
    attention_output_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one, in this order
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    mlp_input_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one, gates first
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_correction: str = "mlp.gate.e_score_correction_bias"  # with its ending
    correction_is_row: bool = False  # [1, num_experts]
    experts: ExpertNames = ExpertNames()  # noqa: RUF009 - frozen
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_output_gate: str = "mlp.shared_expert_gate"
