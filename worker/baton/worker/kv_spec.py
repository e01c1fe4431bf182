"""What a worker's KV cache consists of: groups of layers whose blocks are of one kind and one shape. Knows no memory.

A block holds what `block_size` tokens leave in all layers of one group. Each request has one block table a group.

kind      a block of one layer                       a prefix of n tokens needs
full      keys and values of every token             the blocks of [0, n)
window    keys and values of every token             the blocks of the last `window` of these tokens
latent    one vector a token, the same on all ranks  the blocks of [0, n)
state     one state, as it is at the block's end     the last block

A page is the memory of one block of a group of tokens, in all its layers. A state takes several pages, and is in fp32
whatever others hold; baton.worker.state_pieces says where its values lie.

KV layers are numbered group by group: first the layers of group 0, in their order, then those of group 1. With one
group these are the model's numbers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.rpc.errors import Unsupported
from baton.worker.state_pieces import VALUE_BYTES, PlacedState, StateMatrix, place_state

BYTES_PER_VALUE: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "simulated": 8}


class KvKind(enum.Enum):
    """What a group's blocks hold; mirrors baton.v1.KvGroupKind."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table."""

    kind: KvKind
    layers: tuple[int, ...]  # of the model, ascending
    dtype: str  # a key of BYTES_PER_VALUE
    num_kv_heads: int  # of the whole model; of LATENT: 1
    head_dim: int  # of STATE: values of one head's state
    window: int = 0  # tokens, of WINDOW
    # Of float8_e4m3: what the keys and the values of the first layer, the second.. are multiplied with. Empty: all 1.
    kv_scales: tuple[float, ...] = ()
    matrices: tuple[StateMatrix, ...] = ()  # of STATE: what one layer's consists of; empty of another worker's spec

    @property
    def num_layers(self) -> int:
        """Number of layers in this group."""
        return len(self.layers)

    @property
    def reach(self) -> int:
        """Tokens up to a token, including it, whose blocks it reads; 0: all. A state is that of the token before."""
        match self.kind:
            case KvKind.WINDOW:
                return self.window
            case KvKind.STATE:
                return 2
            case _:
                return 0

    def first_block(self, position: int, block_size: int) -> int:
        """Returns the first block that the token at `position` reads."""
        return max(position - self.reach + 1, 0) // block_size if self.reach else 0

    def first_moved(self, num_tokens: int, block_size: int) -> int:
        """Returns the first block that a worker with blocks of this size gets of a prompt that another has computed.

        From there on, the prompt's longest prefix can be found again. Of states only the one at the prompt's end moves.
        """
        if self.kind is KvKind.STATE:
            return (num_tokens - 1) // block_size
        return self.first_block((num_tokens - 1) // block_size * block_size, block_size)

    def most_blocks(self, num_blocks: int, block_size: int, max_step_tokens: int) -> int:
        """Returns the most blocks that a request of `num_blocks` holds, if a step computes so many tokens of it.

        Of states these are the one that a step reads, and the one that it writes.
        """
        if self.kind is KvKind.STATE:
            return min(num_blocks, 2)
        if self.kind is not KvKind.WINDOW:
            return num_blocks
        # A decode may know fewer tokens than are computed, by one block at most.
        span = self.window - 1 + max(max_step_tokens, 2 * block_size)
        return min(num_blocks, (span + block_size - 2) // block_size + 1)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The KV cache of one rank of a worker."""

    model_digest: bytes  # 16 bytes
    block_size: int  # tokens
    groups: tuple[KvGroup, ...]
    tp_size: int = 1
    tp_rank: int = 0
    # Of each KV layer: transfers look them up for every piece.
    _group_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _bytes_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _pages_of: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of a block of each group

    def __post_init__(self) -> None:
        group_of = tuple(index for index, group in enumerate(self.groups) for _ in group.layers)
        sizes = [self.bytes_per_block_layer(group) for group in self.groups]
        object.__setattr__(self, "_group_of", group_of)
        object.__setattr__(self, "_bytes_of", tuple(sizes[index] for index in group_of))
        object.__setattr__(self, "_pages_of", tuple(map(self._count_pages, self.groups)))

    @property
    def num_layers(self) -> int:
        """Number of layers in all groups."""
        return len(self._group_of)

    @property
    def token_groups(self) -> tuple[KvGroup, ...]:
        """The groups whose blocks grow with their tokens: all but states."""
        return tuple(group for group in self.groups if group.kind is not KvKind.STATE)

    @property
    def bytes_per_block(self) -> int:
        """One block of every group, all layers. Without states, whose size does not depend on the tokens."""
        return sum(group.num_layers * self.bytes_per_block_layer(group) for group in self.token_groups)

    @property
    def page_bytes(self) -> int:
        """One block of any group of tokens, all its layers: groups of one shape share their blocks' memory."""
        return max(group.num_layers * self.bytes_per_block_layer(group) for group in self.token_groups)

    @property
    def page_layers(self) -> int:
        """Layers of the largest group of tokens."""
        return max(group.num_layers for group in self.token_groups)

    def num_pages(self, num_blocks: int) -> int:
        """Returns the blocks of any group of tokens in the memory of `num_blocks` blocks of all their layers."""
        return num_blocks * self.bytes_per_block // self.page_bytes

    def placed_state(self, group: KvGroup) -> PlacedState:
        """Returns the pieces of a group's state, whose parts are the layers of its pages, page after page.

        Raises Unsupported if the groups of tokens have pages of several shapes, or too small ones.
        """
        sizes = {self.bytes_per_block_layer(each) for each in self.token_groups}
        if len(sizes) != 1:
            found = " and ".join(map(str, sorted(sizes))) or "no"
            raise Unsupported(
                f"blocks of {found} bytes a layer: states need pages of one size, which all other groups share",
                field="model",
            )
        return place_state(group.matrices, group.num_layers, sizes.pop() // VALUE_BYTES)

    def pages_each(self, group: KvGroup) -> int:
        """Returns the pages of one block of a group: of a state as many as its layers' pieces need, else 1."""
        return self._pages_of[self.groups.index(group)] if group.kind is KvKind.STATE else 1

    def layer_pages(self, layer: int) -> int:
        """Returns the pages of one block in a KV layer's group: each piece of a state lies in some of them."""
        return self._pages_of[self.group_of(layer)]

    def _count_pages(self, group: KvGroup) -> int:
        if group.kind is not KvKind.STATE or not group.matrices:
            return 1
        return -(-self.placed_state(group).num_parts // self.page_layers)

    @property
    def layer_places(self) -> tuple[int, ...]:
        """The place of each of the model's layers within its group."""
        places = {layer: place for group in self.groups for place, layer in enumerate(group.layers)}
        return tuple(places[layer] for layer in sorted(places))

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Returns the most pages of all groups that a request holds, if a step computes so many tokens of it."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(
            group.most_blocks(num_blocks, self.block_size, max_step_tokens) * self.pages_each(group)
            for group in self.groups
        )

    def most_tokens(self, num_blocks: int, max_step_tokens: int) -> int:
        """Returns the most tokens of a request that holds at most `num_blocks` pages of all groups."""
        fits, too_many = 0, num_blocks + 1  # full blocks
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.most_blocks(middle * self.block_size, max_step_tokens) <= num_blocks:
                fits = middle
            else:
                too_many = middle
        return fits * self.block_size

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The KV layer of each of the model's layers."""
        layers = [layer for group in self.groups for layer in group.layers]
        numbers = {layer: number for number, layer in enumerate(layers)}
        return tuple(numbers[layer] for layer in sorted(layers))

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The group of each of the model's layers."""
        group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(group_of[layer] for layer in sorted(group_of))

    @property
    def spans(self) -> tuple[range, ...]:
        """The KV layers of each group."""
        starts, start = [], 0
        for group in self.groups:
            starts.append(range(start, start + group.num_layers))
            start += group.num_layers
        return tuple(starts)

    def group_of(self, layer: int) -> int:
        """Returns the index of the group that a KV layer belongs to; the last one for layers that do not exist."""
        return self._group_of[layer] if layer < len(self._group_of) else len(self.groups) - 1

    def layer_bytes(self, layer: int) -> int:
        """Returns the bytes of one block in one KV layer; the last one's for layers that do not exist."""
        return self._bytes_of[layer] if layer < len(self._bytes_of) else self._bytes_of[-1]

    @property
    def largest_layer_bytes(self) -> int:
        """Of one block in the layer where it is largest."""
        return max(map(self.bytes_per_block_layer, self.groups))

    def num_rank_heads(self, group: KvGroup) -> int:
        """Returns the KV heads that this rank holds: its share, or one where there are more ranks than heads."""
        return max(1, group.num_kv_heads // self.tp_size)

    def block_shape(self, group: KvGroup, num_heads: int | None = None) -> tuple[int, int, int, int]:
        """Returns a block of one layer: parts, heads, tokens, values. `num_heads`: of some heads; None: of the rank's.

        The simulator has a word a token.
        """
        if group.dtype == "simulated":
            return 1, 1, self.block_size, 1
        heads = self.num_rank_heads(group) if num_heads is None else num_heads
        match group.kind:
            case KvKind.FULL | KvKind.WINDOW:
                return 2, heads, self.block_size, group.head_dim
            case KvKind.LATENT:
                return 1, heads, self.block_size, group.head_dim
            case KvKind.STATE:
                return 1, heads, 1, group.head_dim

    def bytes_per_block_layer(self, group: KvGroup, num_heads: int | None = None) -> int:
        """Returns the bytes of a block in one layer of a group."""
        return math.prod(self.block_shape(group, num_heads)) * BYTES_PER_VALUE[group.dtype]


def full_spec(
    model_digest: bytes,
    dtype: str,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    tp_size: int = 1,
    tp_rank: int = 0,
    kv_scales: tuple[float, ...] = (),
) -> KvSpec:
    """Returns the spec of a model whose layers all keep every token in one shape."""
    layers = tuple(range(num_layers))
    group = KvGroup(KvKind.FULL, layers, dtype, num_kv_heads, head_dim, kv_scales=kv_scales)
    return KvSpec(model_digest, block_size, (group,), tp_size, tp_rank)
