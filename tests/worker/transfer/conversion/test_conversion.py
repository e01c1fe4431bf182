"""Conversions against the plain way: every token of every head found by its own arithmetic."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kernels.reference.kv.quantization import quantize_kv
from baton.rpc.errors import Mismatch
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec, full_spec
from baton.worker.transfer.base import Piece
from baton.worker.transfer.conversion.blocks import conversion_to, worker_conversion
from baton.worker.transfer.conversion.heads import heads_of, ranks_of, shared_heads, targets_of

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}
NUM_LAYERS = 3


def layout(dtype="bfloat16", block_size=16, heads=2, head_dim=4, tp=(1, 0), **values) -> KvSpec:
    size, rank = tp
    fields = {
        "model_digest": bytes(16),
        "dtype": dtype,
        "num_layers": NUM_LAYERS,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "tp_size": size,
        "tp_rank": rank,
    }
    return full_spec(**{**fields, **values})


def random_kv(dtype: str, heads: int, num_tokens: int, head_dim: int, seed: int) -> torch.Tensor:
    """[NUM_LAYERS, 2, heads, num_tokens, head_dim] of one prompt."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(NUM_LAYERS, 2, heads, num_tokens, head_dim, generator=generator) * 40
    return values.to(DTYPES[dtype])


def blocks_of(kv: torch.Tensor, layout: KvSpec) -> torch.Tensor:
    """Returns the prompt as one rank's blocks, token by token, with zeros after its end."""
    num_layers, parts, _, num_tokens, dim = kv.shape
    held = list(heads_of(layout))
    num_blocks = -(-num_tokens // layout.block_size)
    blocks = torch.zeros(num_blocks, num_layers, parts, len(held), layout.block_size, dim, dtype=kv.dtype)
    for token in range(num_tokens):
        block, offset = divmod(token, layout.block_size)
        for index, head in enumerate(held):
            blocks[block, :, :, index, offset] = kv[:, :, head, token]
    return blocks


def raw(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def piece_of(sender: KvSpec, receiver: KvSpec, num_tokens: int, first: int, count: int, layers=(0, NUM_LAYERS)):
    """Receiver blocks [first, first + count) of a prompt, and the sender's blocks that hold them."""
    start, stop = first * receiver.block_size, min(num_tokens, (first + count) * receiver.block_size)
    held = range(start // sender.block_size, -(-stop // sender.block_size))
    return Piece(layers[0], first, count, list(held), start - held.start * sender.block_size, layers[1] - layers[0])


def both_ways(conversion, blocks: torch.Tensor, piece: Piece) -> bytes:
    """What the host and the device make of a piece, which must be the same."""
    given = blocks[piece.block_ids, piece.layer : piece.layer + piece.num_layers].contiguous()
    host = conversion.on_host(memoryview(raw(given)), piece)
    made = conversion.on_device(given, piece)
    assert made.is_contiguous()
    assert made.shape[:2] == (piece.num_blocks, piece.num_layers)
    assert raw(made) == bytes(host)
    assert len(host) == piece.num_blocks * piece.num_layers * conversion.layer_bytes(0)
    return bytes(host)


@st.composite
def prompts(draw):
    """Block sizes of both ends, a prompt's length, and some of the receiver's blocks."""
    sizes = st.sampled_from([1, 4, 16, 32, 64, 12])
    sender, receiver = draw(sizes), draw(sizes)
    num_tokens = draw(st.integers(1, 150))
    total = -(-num_tokens // receiver)
    first = draw(st.integers(0, total - 1))
    return sender, receiver, num_tokens, first, draw(st.integers(1, total - first))


@settings(max_examples=120, deadline=None)
@given(
    prompt=prompts(),
    dtype=st.sampled_from(list(DTYPES)),
    heads=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([1, 4]),
    layers=st.sampled_from(list(itertools.combinations(range(NUM_LAYERS + 1), 2))),
    as_words=st.booleans(),
)
def test_blocks_of_another_size_are_the_same_tokens(prompt, dtype, heads, head_dim, layers, as_words):
    from_size, to_size, num_tokens, first, count = prompt
    sender = layout(dtype, from_size, heads, head_dim)
    receiver = layout(dtype, to_size, heads, head_dim)
    conversion = conversion_to(sender, receiver)
    if from_size == to_size:
        assert conversion is None
        return
    kv = random_kv(dtype, heads, num_tokens, head_dim, seed=num_tokens)
    piece = piece_of(sender, receiver, num_tokens, first, count, layers)
    given = blocks_of(kv, sender)
    if as_words:
        given = given.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[given.element_size()])
    wanted = blocks_of(kv, receiver)[first : first + count, layers[0] : layers[1]]
    assert both_ways(conversion, given, piece) == raw(wanted)
    assert conversion.heads(0) is None
    assert conversion.layer_bytes(0) == receiver.layer_bytes(0)


@pytest.mark.parametrize(("from_size", "to_size"), [(16, 64), (64, 16), (16, 32), (32, 16), (32, 64), (64, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_block_in_any_cut_gives_the_whole_prompt(from_size, to_size, dtype):
    sender, receiver = layout(dtype, from_size), layout(dtype, to_size)
    num_tokens = 203
    kv = random_kv(dtype, 2, num_tokens, 4, seed=1)
    given, wanted = blocks_of(kv, sender), blocks_of(kv, receiver)
    conversion = conversion_to(sender, receiver)
    for count in (1, 2, 3):
        made = b""
        for first in range(0, len(wanted), count):
            some = min(count, len(wanted) - first)
            made += both_ways(conversion, given, piece_of(sender, receiver, num_tokens, first, some))
        assert made == raw(wanted)


def test_the_simulators_words_are_regrouped():
    sender, receiver = layout("simulated", 4, 1, 1), layout("simulated", 16, 1, 1)
    words = np.arange(1, 12 * 2 + 1, dtype=np.uint64).reshape(3, 2, 4)  # 3 blocks, 2 layers
    made = conversion_to(sender, receiver).on_host(memoryview(words.tobytes()), Piece(0, 0, 1, [0, 1, 2], 0, 2))
    wanted = np.zeros((2, 16), np.uint64)
    wanted[:, :12] = words.transpose(1, 0, 2).reshape(2, 12)
    assert bytes(made) == wanted.tobytes()


def test_data_of_another_length_is_an_error():
    conversion = conversion_to(layout(block_size=16), layout(block_size=32))
    with pytest.raises(ValueError, match="reshape"):
        conversion.on_host(memoryview(bytes(100)), Piece(0, 0, 1, [0, 1]))


# Dtypes.


def scaled(size: int = 16, **values: object) -> KvSpec:
    return layout(
        "float8_e4m3", size, kv_scales=tuple(np.float32([0.3, 1.7, 0.01, 250.0, 1.0, 3.3]).tolist()), **values
    )


def scales_of(layout: KvSpec) -> torch.Tensor:
    return torch.tensor(layout.groups[0].kv_scales or [1.0] * 2 * NUM_LAYERS, dtype=torch.float32).view(NUM_LAYERS, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("receiver", [scaled(), scaled(64), layout("float8_e4m3", 16), layout("float8_e4m3", 32)])
def test_8_bit_values_are_those_of_the_receivers_kernel(dtype, receiver):
    sender = layout(dtype, 16)
    kv = random_kv(dtype, 2, 130, 4, seed=3)
    # Every scale has values beyond its range, subnormal ones, and ties.
    kv[:, :, :, 0] = torch.tensor([1e5, -1e5, 3e4, -3e4]).clamp(-6e4, 6e4)
    kv[:, :, :, 1] = torch.tensor([1e-4, -3e-4, 0.0, -0.0])
    kv[:, :, :, 2] = torch.tensor([1.0625, 1.1875, 17.0, 19.0])
    per_head = scales_of(receiver)[:, :, None].expand(-1, -1, 2)
    stored = torch.stack(
        [quantize_kv(kv[layer].permute(2, 0, 1, 3), per_head[layer]).permute(1, 2, 0, 3) for layer in range(NUM_LAYERS)]
    )
    wanted = blocks_of(stored.view(torch.uint8), receiver)
    piece = piece_of(sender, receiver, 130, 0, len(wanted))
    assert both_ways(conversion_to(sender, receiver), blocks_of(kv, sender), piece) == raw(wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_number_is_converted_as_by_the_receivers_kernel(dtype):
    """Ties included: a few come out otherwise where a value is multiplied with 1 / scale."""
    sender, receiver = layout(dtype, 16, heads=1, head_dim=4096), scaled(heads=1, head_dim=4096)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    kv = every.view(16, 4096).expand(NUM_LAYERS, 2, 1, 16, 4096).contiguous()
    scales = scales_of(receiver)[:, :, None]
    stored = [quantize_kv(kv[layer].permute(2, 0, 1, 3), scales[layer]).permute(1, 2, 0, 3) for layer in range(3)]
    wanted = blocks_of(torch.stack(stored).view(torch.uint8), receiver)
    made = both_ways(conversion_to(sender, receiver), blocks_of(kv, sender), piece_of(sender, receiver, 16, 0, 1))
    assert made == raw(wanted)


def test_a_piece_takes_the_scales_of_its_own_layers():
    sender, receiver = layout("bfloat16", 16), scaled()
    given = blocks_of(random_kv("bfloat16", 2, 40, 4, seed=4), sender)
    conversion = conversion_to(sender, receiver)
    whole = torch.frombuffer(
        bytearray(both_ways(conversion, given, piece_of(sender, receiver, 40, 0, 3))), dtype=torch.uint8
    ).view(3, NUM_LAYERS, -1)
    for layer in range(NUM_LAYERS):
        piece = piece_of(sender, receiver, 40, 0, 3, (layer, layer + 1))
        assert both_ways(conversion, given, piece) == raw(whole[:, layer])


# Largest difference, of the value and absolute; and the largest number.
STATED = {
    "float32": (2.0**-24, 0.0, math.inf),
    "bfloat16": (2.0**-8, 0.0, math.inf),
    "float16": (2.0**-11, 2.0**-25, 65504.0),
    "float8_e4m3": (2.0**-4, 2.0**-10, 448.0),
}


@pytest.mark.parametrize(("from_dtype", "to_dtype"), list(itertools.permutations(DTYPES, 2)))
@pytest.mark.parametrize("with_scales", [False, True])
def test_no_value_is_further_off_than_stated(from_dtype, to_dtype, with_scales):
    sender, receiver = (
        scaled(size) if with_scales and dtype == "float8_e4m3" else layout(dtype, size)
        for dtype, size in ((from_dtype, 16), (to_dtype, 32))
    )
    generator = torch.Generator().manual_seed(7)
    kv = torch.randn(NUM_LAYERS, 2, 2, 64, 4, generator=generator) * 10.0 ** torch.randint(
        -6, 7, (NUM_LAYERS, 2, 2, 64, 4), generator=generator
    )
    from_largest = STATED[from_dtype][2]
    kv = kv.clamp(-from_largest, from_largest).to(DTYPES[from_dtype])
    piece = piece_of(sender, receiver, 64, 0, 2)
    made = both_ways(conversion_to(sender, receiver), blocks_of(kv, sender), piece)
    got = torch.frombuffer(bytearray(made), dtype=DTYPES[to_dtype]).view(2, NUM_LAYERS, 2, 2, 32, 4)
    scales = scales_of(sender)[:, :, None, None, None].double()
    wanted = blocks_of(kv.double() * scales, receiver)
    unit = scales_of(receiver)[None, :, :, None, None, None].double()
    relative, absolute, largest = STATED[to_dtype]
    relative += 2.0**-23 if with_scales else 0.0  # the scale's own rounding
    wanted = wanted.clamp(-largest * unit, largest * unit)
    off = (got.double() * unit - wanted).abs()
    assert (off <= (relative * wanted.abs()).clamp(min=absolute * unit)).all()
    assert torch.isfinite(got.float()).all()


@pytest.mark.parametrize("to_dtype", ["float32", "bfloat16", "float16"])
def test_8_bits_with_scales_of_powers_of_two_widen_exactly(to_dtype):
    sender = layout("float8_e4m3", 16, kv_scales=(0.5, 2.0, 1.0, 0.25, 4.0, 1.0))
    receiver = layout(to_dtype, 16)
    kv = random_kv("float8_e4m3", 2, 16, 4, seed=9)
    made = both_ways(conversion_to(sender, receiver), blocks_of(kv, sender), piece_of(sender, receiver, 16, 0, 1))
    wanted = kv.float() * scales_of(sender)[:, :, None, None, None]
    assert made == raw(blocks_of(wanted.to(DTYPES[to_dtype]), receiver))


# Ranks.

SIZES = (1, 2, 4)


@pytest.mark.parametrize(("num_senders", "num_receivers"), list(itertools.product((1, 2, 4, 8), repeat=2)))
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_head_reaches_every_rank_that_holds_it_exactly_once(num_senders, num_receivers, heads):
    receivers = ranks_of(layout(heads=heads, tp=(num_receivers, 0)))
    arrived = {rank: [] for rank in range(num_receivers)}
    for sender in ranks_of(layout(heads=heads, tp=(num_senders, 0))):
        for rank, shared in targets_of(sender, receivers).items():
            sent = list(heads_of(sender))[shared.at_sender : shared.at_sender + shared.count]
            assert sent == list(heads_of(receivers[rank]))[shared.at_receiver : shared.at_receiver + shared.count]
            arrived[rank] += sent
    for receiver in receivers:
        assert sorted(arrived[receiver.tp_rank]) == list(heads_of(receiver))


def test_equal_ranks_pass_their_blocks_as_they_are():
    for one in ranks_of(layout(heads=2, tp=(4, 0))):
        assert list(targets_of(one, ranks_of(one))) == [one.tp_rank]
        assert conversion_to(one, one) is None


def test_ranks_with_the_same_heads_pass_their_blocks_as_they_are():
    assert conversion_to(layout(heads=1, tp=(2, 0)), layout(heads=1)) is None


@pytest.mark.parametrize(("num_senders", "num_receivers"), list(itertools.product(SIZES, repeat=2)))
@pytest.mark.parametrize(("heads", "dtypes"), [(4, ("bfloat16", "bfloat16")), (2, ("bfloat16", "float8_e4m3"))])
@pytest.mark.parametrize(("from_size", "to_size"), [(16, 16), (16, 32), (32, 16)])
def test_ranks_get_their_heads_of_the_whole(num_senders, num_receivers, heads, dtypes, from_size, to_size):
    kv = random_kv(dtypes[0], heads, 70, 4, seed=5)
    stored = kv.float().clamp(-448, 448).to(DTYPES[dtypes[1]]) if dtypes[0] != dtypes[1] else kv
    senders = ranks_of(layout(dtypes[0], from_size, heads, tp=(num_senders, 0)))
    for receiver in ranks_of(layout(dtypes[1], to_size, heads, tp=(num_receivers, 0))):
        wanted = blocks_of(stored, receiver)
        made = torch.zeros_like(wanted)
        for sender in senders:
            if shared_heads(sender, receiver) is None:
                with pytest.raises(Mismatch, match="no KV heads"):
                    conversion_to(sender, receiver)
                continue
            sent = blocks_of(kv, sender)
            conversion = conversion_to(sender, receiver)
            piece = piece_of(sender, receiver, 70, 0, len(wanted))
            if conversion is None:
                made.copy_(sent)
                continue
            first, count = conversion.heads(0) or (0, wanted.shape[3])
            data = torch.frombuffer(bytearray(both_ways(conversion, sent, piece)), dtype=wanted.dtype)
            made[:, :, :, first : first + count] = data.view(len(wanted), NUM_LAYERS, 2, count, to_size, 4)
        assert raw(made) == raw(wanted)


def latents(dtype="bfloat16", block_size=16, tp=(1, 0), dim=6) -> KvSpec:
    group = KvGroup(KvKind.LATENT, tuple(range(NUM_LAYERS)), dtype, 1, dim)
    return KvSpec(bytes(16), block_size, (group,), *tp)


@pytest.mark.parametrize(("from_size", "to_size"), [(16, 16), (16, 64), (64, 16), (4, 6)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_latents_are_regrouped_and_converted(from_size, to_size, dtypes):
    sender, receiver = latents(dtypes[0], from_size), latents(dtypes[1], to_size)
    kv = random_kv(dtypes[0], 2, 70, 6, seed=from_size)[:, :1, :1]  # one part and one head
    sent, wanted = blocks_of(kv, sender), blocks_of(kv.to(DTYPES[dtypes[1]]), receiver)
    conversion = conversion_to(sender, receiver)
    if conversion is None:
        assert (from_size, dtypes[0]) == (to_size, dtypes[1])
        return
    piece = piece_of(sender, receiver, 70, 0, len(wanted))
    assert both_ways(conversion, sent, piece) == raw(wanted)


def test_every_rank_has_all_of_a_latent_and_one_sends_it():
    for num_senders, num_receivers in ((1, 4), (4, 1), (2, 4), (4, 4)):
        senders = ranks_of(latents(tp=(num_senders, 0)))
        receivers = ranks_of(latents(tp=(num_receivers, 0)))
        for receiver in receivers:
            assert heads_of(receiver) == range(1)
            assert sum(shared_heads(sender, receiver) is not None for sender in senders) == 1


@pytest.mark.parametrize("dtypes", [("bfloat16", "float8_e4m3"), ("float8_e4m3", "bfloat16")])
def test_latents_of_8_bits_are_refused_by_name(dtypes):
    with pytest.raises(Mismatch, match=f"has dtype={dtypes[0]}, the decode worker has dtype={dtypes[1]}"):
        worker_conversion(latents(dtypes[0]), latents(dtypes[1]))


@pytest.mark.parametrize(
    "values",
    [{"model_digest": bytes([1]) * 16}, {"head_dim": 8}, {"heads": 4}, {"num_layers": 2}, {"dtype": "simulated"}],
)
def test_unsupported_conversions_are_refused(values):
    with pytest.raises(Mismatch, match=r"the prefill worker has .*, the decode worker has "):
        conversion_to(layout(), layout(**values))


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(2, 1), (1, 2), (4, 4)])
def test_workers_of_several_ranks_are_refused_by_name(num_senders, num_receivers):
    sender, receiver = layout(tp=(num_senders, 0), heads=4), layout(tp=(num_receivers, 0), heads=4)
    with pytest.raises(Mismatch, match=f"has tp_size={num_senders}, .* has tp_size={num_receivers}") as caught:
        worker_conversion(sender, receiver)
    assert caught.value.field == "layout.tp_size"


def test_workers_of_one_rank_convert_as_ranks_do():
    assert worker_conversion(layout(), layout()) is None
    assert worker_conversion(layout(), layout(block_size=32)) is not None
    with pytest.raises(Mismatch, match="head_dim"):
        worker_conversion(layout(), layout(head_dim=8))
