"""KV in another worker's layout, made on the GPU: the host's bits, and those that the receiver's kernel stores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.engine_harness import make_request
from support.engine.gpu_engines import executor_for, make_model, make_prompts
from support.transfer.handover_harness import Network, Node, finished, idle, make_node, run_until

from baton.kernels.reference.kv.quantization import quantize_kv
from baton.kernels.rope.rope_cache import rope_and_cache
from baton.worker.core import BlockId
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.kv_spec import KvSpec, full_spec
from baton.worker.transfer.base import Piece
from baton.worker.transfer.conversion.blocks import conversion_to
from baton.worker.transfer.kinds.cuda_slots import converted

pytestmark = pytest.mark.gpu

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 3, 4, 64
SCALES = tuple(torch.tensor([0.3, 1.7, 0.01, 250.0, 1.0, 3.3]).tolist())


def spec_of(dtype: str, block_size: int, scales: tuple[float, ...] = ()) -> KvSpec:
    kv_scales = scales if dtype == "float8_e4m3" else ()
    return full_spec(bytes(16), dtype, NUM_LAYERS, NUM_HEADS, HEAD_DIM, block_size, kv_scales=kv_scales)


def pool_of(spec: KvSpec, num_blocks: int) -> torch.Tensor:
    shape = (NUM_LAYERS, num_blocks, *spec.block_shape(spec.groups[0]))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 60
    return values.to(DTYPES[spec.groups[0].dtype]).cuda()


@pytest.mark.parametrize(("from_dtype", "to_dtype"), list(itertools.product(DTYPES, repeat=2)))
@pytest.mark.parametrize(("from_size", "to_size"), [(16, 64), (64, 16), (16, 24), (32, 32)])
@pytest.mark.parametrize("scales", [(), SCALES], ids=["plain", "scaled"])
def test_the_device_makes_the_hosts_bits(
    from_dtype: str, to_dtype: str, from_size: int, to_size: int, scales: tuple[float, ...]
) -> None:
    sender, receiver = spec_of(from_dtype, from_size, scales), spec_of(to_dtype, to_size, scales)
    conversion = conversion_to(sender, receiver)
    if conversion is None:
        assert sender == receiver
        return
    pool = pool_of(sender, 12)
    skip = 32 if from_size == 64 else 0
    piece = Piece(1, 0, 96 // to_size + 1, [BlockId(block) for block in (7, 2, 11, 5, 0, 1)], skip, 2)
    made = converted(KvCopies(lambda: pool), piece, conversion).cpu()
    blocks = pool[1:3, piece.block_ids].transpose(0, 1).contiguous().cpu()
    wanted = conversion.on_host(memoryview(blocks.view(torch.uint8).numpy()).cast("B"), piece)
    assert made.numpy().tobytes() == bytes(wanted)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_8_bits_are_those_of_the_kernel_that_writes_them(compute: torch.dtype) -> None:
    sender = spec_of(str(compute).removeprefix("torch."), 16)
    receiver = spec_of("float8_e4m3", 16, SCALES)
    num_tokens, num_q_heads = 160, 8
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(num_tokens, (num_q_heads + 2 * NUM_HEADS) * HEAD_DIM, generator=generator) * 90
    angles = torch.rand(num_tokens, HEAD_DIM // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).cuda()
    positions = torch.arange(num_tokens, device="cuda")
    slots = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    wide, narrow = pool_of(sender, 10), pool_of(receiver, 10)
    for layer in range(NUM_LAYERS):
        scale = torch.tensor(SCALES, device="cuda").view(-1, 2)[layer][:, None].repeat(1, NUM_HEADS)
        for cache, kv_scale in ((wide, None), (narrow, scale)):
            rope_and_cache(
                qkv.to(compute).cuda(), cache[layer], positions, slots, cos_sin, num_q_heads, kv_scale=kv_scale
            )
    conversion = conversion_to(sender, receiver)
    assert conversion is not None
    piece = Piece(0, 0, 10, [BlockId(block) for block in range(10)], num_layers=NUM_LAYERS)
    made = conversion.on_device(wide.transpose(0, 1).contiguous(), piece)
    assert torch.equal(made.view(torch.uint8), narrow.transpose(0, 1).contiguous().view(torch.uint8))


# Whole workers.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with KV scales."""
    folder = tmp_path_factory.mktemp("llama-128")
    make_model("llama-128", folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        for index, name in enumerate(("k_scale", "v_scale")):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([0.05 + 0.3 * layer + 0.1 * index])
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    for node in made.nodes.values():
        node.handover.close()
        node.executor.close()


def node_of(network: Network, folder: Path, name: str, **fields: object) -> Node:
    return make_node(network, name, executor_for(folder, dtype="bfloat16", **fields))  # type: ignore[arg-type]


def tokens_of(node: Node, block_ids: list[BlockId], num_tokens: int) -> torch.Tensor:
    """[num_layers, 2, heads, num_tokens, head_dim] out of a pool."""
    spec = node.executor.kv_spec
    dtype = DTYPES[spec.groups[0].dtype]
    shape = (len(block_ids), *spec.block_shape(spec.groups[0]))
    layers = []
    for layer in range(spec.num_layers):
        data = bytearray(node.executor.read_blocks(layer, block_ids))
        blocks = torch.frombuffer(data, dtype=dtype).view(shape)
        layers.append(torch.cat([block.view(torch.uint8) for block in blocks], dim=2))
    return torch.stack(layers)[:, :, :, :num_tokens].contiguous().view(dtype)


@pytest.mark.parametrize(
    ("prefill_fields", "decode_fields"),
    [
        ({"block_size": 16}, {"block_size": 64}),
        ({"block_size": 64}, {"block_size": 16}),
        ({"block_size": 16}, {"block_size": 64, "kv_cache_dtype": "fp8_e4m3"}),
    ],
)
def test_a_prompt_arrives_in_the_receivers_layout(
    network: Network, folder: Path, prefill_fields: dict[str, object], decode_fields: dict[str, object]
) -> None:
    pair = prefill, decode = (
        node_of(network, folder, "prefill", **prefill_fields),
        node_of(network, folder, "decode", **decode_fields),
    )
    prompt = make_prompts([150], seed=8)[0]
    request = make_request(prompt, 6)
    tables: dict[str, list[BlockId]] = {}

    def done() -> bool:
        for node in pair:
            for name in node.engine._states:
                tables[node.name] = node.engine.block_ids(name)
        return finished(decode, request)()

    decode.submit(request, prefill)
    run_until(pair, done, seconds=60)
    run_until(pair, idle(*pair))
    assert decode.handover.counters().num_transfers == 1
    assert len(decode.seen.tokens[request.request_id]) == 6
    sent, arrived = (tokens_of(node, tables[node.name], len(prompt)) for node in pair)
    if decode.executor.kv_spec.groups[0].kv_scales:
        scales = torch.tensor(decode.executor.kv_spec.groups[0].kv_scales).view(-1, 2, 1).expand(-1, -1, sent.shape[2])
        layers = [quantize_kv(one.permute(2, 0, 1, 3), scale) for one, scale in zip(sent, scales, strict=True)]
        sent = torch.stack([layer.permute(1, 2, 0, 3) for layer in layers])
    assert decode.executor.kv_spec.groups[0].dtype == str(sent.dtype).removeprefix("torch.").removesuffix("fn")
    assert torch.equal(sent.contiguous().view(torch.uint8), arrived.view(torch.uint8))


def test_the_layout_carries_the_checkpoints_scales(network: Network, folder: Path) -> None:
    (group,) = node_of(network, folder, "a", kv_cache_dtype="fp8_e4m3").executor.kv_spec.groups
    assert group.kv_scales == pytest.approx([0.05, 0.15, 0.35, 0.45, 0.65, 0.75])
