"""Makes the weights of multi-head latent attention."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from baton.rpc.errors import Unsupported
from baton.worker.layers.latent_attention import LatentWeights
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.spec import LayerSpec
from baton.worker.quantization.base import Staged
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.registry import UNQUANTIZED
from baton.worker.weights.layer_maker import LayerMaker


def make_latent_attention(layer: LayerMaker, spec: LayerSpec, latent: LatentSpec) -> LatentWeights:
    """Makes one layer's weights."""
    names, own, hidden = layer.names, layer.names.latent, layer.hidden
    has_rank = latent.q_rank > 0
    first = own.q_a if has_rank else own.q
    q_b = layer.linear((own.q_b,), (latent.projected_size,), latent.q_rank) if has_rank else None
    return LatentWeights(
        input_norm=layer.norm(names.attention_input_norm, spec.input_norms and spec.attention_input_norm),
        qkv_a=layer.linear((first, own.kv_a), latent.down_sizes, hidden, latent.bias),
        q_a_norm=layer.norm(own.q_a_norm, has_rank, (latent.q_rank,)),
        q_b=q_b,
        kv_a_norm=layer.needed_norm(own.kv_a_norm, (latent.kv_rank,)),
        kv_b=_dense(layer, layer.linear((own.kv_b,), (latent.up_size,), latent.kv_rank), latent),
        o=layer.linear((names.o,), (hidden,), latent.attended_size, latent.bias),
        output_norm=layer.norm(names.attention_output_norm, spec.output_norms or spec.sum_norms),
    )


def _dense(layer: LayerMaker, linear: LinearWeights, latent: LatentSpec) -> Tensor:
    """Returns the linear's matrix in the model's dtype: decodes multiply with parts of its transpose.

    A quantized one is dequantized once it is loaded, and freed.
    """
    method = linear.method
    if method is UNQUANTIZED:
        return linear.params["weight"]
    if not isinstance(method, PackedMethod):
        raise Unsupported(
            f"{layer.prefix}{layer.names.latent.kv_b}: weights in {method.name} are not dequantized as a whole, which "
            "latent attention needs",
            field="model",
        )
    dense = layer.maker.empty((latent.up_size, latent.kv_rank))
    num_bytes = sum(one.nbytes for one in linear.params.values())
    layer.maker.finish(Staged(partial(_dequantize, method, linear, dense), num_bytes))
    return dense


def _dequantize(method: PackedMethod, linear: LinearWeights, out: Tensor) -> None:
    for rows in method.blocks(linear.params):
        out[rows].copy_(method.dequantized(linear.params, rows))
