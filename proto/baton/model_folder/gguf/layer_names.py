"""The names of a layer's tensors in GGUF files, and in Hugging Face form. An expert's number is {}.

A name in the file that has its ending gives the whole name in Hugging Face form.
"""

from __future__ import annotations

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_INPUT_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

LLAMA = {**_INPUT_NORMS, **_ATTENTION, **_MLP}
NORMED = {**LLAMA, **_QK_NORMS}
MIXTRAL = {
    **_INPUT_NORMS,
    **_ATTENTION,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
GRANITE_MOE = {**MIXTRAL, "ffn_gate_inp": "block_sparse_moe.router.layer"}
ERNIE_MOE = {
    **LLAMA,
    **_EXPERTS,
    "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
QWEN2_MOE = {**_INPUT_NORMS, **_ATTENTION, **_EXPERTS, **_SHARED_EXPERT}
QWEN3_MOE = {**_INPUT_NORMS, **_ATTENTION, **_QK_NORMS, **_EXPERTS}
OLMOE = QWEN3_MOE
OLMO2 = {**_ATTENTION, **_QK_NORMS, **_OUTPUT_NORMS, **_MLP}
GEMMA2 = {
    **_ATTENTION,
    **_OUTPUT_NORMS,
    **_MLP,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
GEMMA3 = {**GEMMA2, **_QK_NORMS}
PHI3 = {
    **_INPUT_NORMS,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
STARCODER2 = {**_INPUT_NORMS, **_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
