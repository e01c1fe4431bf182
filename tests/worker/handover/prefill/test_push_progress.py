"""Whatever order layers and chunks come in, every block of the receiver goes out once, when it is complete."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.worker.core import BlockId
from baton.worker.handover.prefill.push_progress import PushProgress, PushTarget, SourceGroup, TargetGroup
from baton.worker.transfer.base import Piece


@dataclass
class Model:
    """A naive model: the computed tokens, and so the allowed tokens of each piece."""

    num_layers: int
    sender_size: int
    receiver_size: int
    num_tokens: int
    first_block: int
    max_block_layers: int
    num_cached: int = 0
    pushed: dict[tuple[int, int], int] = field(default_factory=dict)  # (layer, receiver's block): times
    num_finished: int = 0

    def __post_init__(self) -> None:
        self.computed = [self.num_cached] * self.num_layers
        num_blocks = -(-self.num_tokens // self.sender_size)
        self.block_ids = [BlockId(1000 - 3 * index) for index in range(num_blocks)]
        held = [*self.block_ids, BlockId(9999)]  # one for what is generated
        self.progress = PushProgress(
            [SourceGroup(range(self.num_layers), held)], self.sender_size, self.num_tokens, self.num_cached
        )

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.receiver_size)

    def target(self) -> PushTarget:
        return PushTarget(
            self.receiver_size,
            [TargetGroup(self.first_block, self.max_block_layers)],
            self.check_piece,
            self.finish,
        )

    def finish(self) -> None:
        self.num_finished += 1
        self.check_all_sent()

    def check_piece(self, piece: Piece) -> None:
        assert self.num_finished == 0
        assert 1 <= piece.num_layers * piece.num_blocks <= self.max_block_layers
        read = len(piece.block_ids) * piece.num_layers * self.sender_size  # tokens
        ends = 2 * self.sender_size * max(1, self.max_block_layers * self.receiver_size // self.sender_size)
        assert read <= self.max_block_layers * self.receiver_size + ends
        first = self.first_block + piece.first_index
        for layer in range(piece.layer, piece.layer + piece.num_layers):
            for block in range(first, first + piece.num_blocks):
                self.pushed[layer, block] = self.pushed.get((layer, block), 0) + 1
                end = min((block + 1) * self.receiver_size, self.num_tokens)
                assert end <= self.computed[layer], "a block went out before it was complete"
        self.check_place(piece, first)

    def check_place(self, piece: Piece, first: int) -> None:
        """Checks the position of every token of the piece by the sender's blocks and the skip."""
        assert 0 <= piece.skip_tokens < self.sender_size
        start = first * self.receiver_size
        stop = min((first + piece.num_blocks) * self.receiver_size, self.num_tokens)
        for token in range(start, stop):
            block, offset = divmod(piece.skip_tokens + token - start, self.sender_size)
            assert (piece.block_ids[block], offset) == (
                self.block_ids[token // self.sender_size],
                token % self.sender_size,
            )
        assert len(piece.block_ids) == -(-(piece.skip_tokens + stop - start) // self.sender_size), "no block too many"

    def check_all_sent(self) -> None:
        wanted = {
            (layer, block) for layer in range(self.num_layers) for block in range(self.first_block, self.num_blocks)
        }
        assert set(self.pushed) == wanted
        assert set(self.pushed.values()) <= {1}

    def check_prompt(self) -> None:
        """Nothing that could go is held back."""
        for layer, computed in enumerate(self.computed):
            done = computed >= self.num_tokens
            for block in range(self.first_block, self.num_blocks if done else computed // self.receiver_size):
                assert (layer, block) in self.pushed


@st.composite
def models(draw: st.DrawFn) -> Model:
    sizes = st.sampled_from([1, 3, 4, 16, 64])
    sender, receiver = draw(sizes), draw(sizes)
    num_tokens = draw(st.integers(1, 200))
    total = -(-num_tokens // receiver)
    cached = draw(st.integers(0, (num_tokens - 1) // sender)) * sender
    return Model(
        num_layers=draw(st.integers(1, 4)),
        sender_size=sender,
        receiver_size=receiver,
        num_tokens=num_tokens,
        first_block=draw(st.integers(0, total - 1)),
        max_block_layers=draw(st.sampled_from([1, 2, 5, 16, 1000])),
        num_cached=cached,
    )


@settings(max_examples=300, deadline=None)
@given(model=models(), data=st.data())
def test_every_block_of_every_layer_goes_once_whatever_the_order(model: Model, data: st.DataObject) -> None:
    progress, begun = model.progress, False
    for _ in range(data.draw(st.integers(0, 12))):
        step = data.draw(st.sampled_from(["layer", "all", "start", "stale"]))
        tokens = data.draw(st.integers(0, model.num_tokens))
        if step == "start" and not begun:
            begun = True
            progress.start(model.target())
        elif step == "layer":
            layer = data.draw(st.integers(0, model.num_layers - 1))
            model.computed[layer] = max(model.computed[layer], tokens)
            progress.layer_computed(layer, tokens)
        elif step == "all":
            model.computed = [max(one, tokens) for one in model.computed]
            progress.all_computed(tokens)
        elif step == "stale":
            progress.layer_computed(0, 0)
        if begun:
            model.check_prompt()
    model.computed = [model.num_tokens] * model.num_layers
    progress.all_computed(model.num_tokens)
    if not begun:
        progress.start(model.target())
    assert model.num_finished == 1
    model.check_all_sent()
    progress.all_computed(model.num_tokens)
    assert model.num_finished == 1


@pytest.mark.parametrize(("sender", "receiver"), [(4, 6), (16, 64), (32, 16)])
def test_layers_that_finish_together_share_pieces(sender: int, receiver: int) -> None:
    model = Model(8, sender, receiver, num_tokens=2 * receiver, first_block=0, max_block_layers=8)
    pieces: list[Piece] = []
    model.progress.start(PushTarget(receiver, [TargetGroup(0, 8)], pieces.append, lambda: None))
    assert pieces == []
    model.progress.all_computed(2 * receiver)
    assert [(piece.layer, piece.num_layers, piece.num_blocks) for piece in pieces] == [(0, 4, 2), (4, 4, 2)]


def test_the_data_read_for_a_piece_is_bounded_with_incommensurable_sizes() -> None:
    model = Model(2, sender_size=4, receiver_size=3, num_tokens=17, first_block=5, max_block_layers=2)
    model.computed = [17, 17]
    model.progress.start(model.target())
    model.progress.all_computed(17)
    assert model.num_finished == 1


def test_a_block_of_the_receiver_waits_for_the_last_of_its_tokens() -> None:
    pieces: list[Piece] = []
    model = Model(1, 16, 64, num_tokens=100, first_block=0, max_block_layers=9)
    model.progress.start(PushTarget(64, [TargetGroup(0, 9)], pieces.append, lambda: None))
    model.progress.layer_computed(0, 63)
    assert pieces == []
    model.progress.layer_computed(0, 64)
    assert [(piece.first_index, piece.num_blocks, len(piece.block_ids)) for piece in pieces] == [(0, 1, 4)]
    model.progress.layer_computed(0, 100)
    assert [(piece.first_index, piece.num_blocks, len(piece.block_ids)) for piece in pieces[1:]] == [(1, 1, 3)]


def test_parts_of_a_block_go_as_they_are_computed() -> None:
    pieces: list[Piece] = []
    model = Model(1, 64, 16, num_tokens=64, first_block=1, max_block_layers=9)
    model.progress.start(PushTarget(16, [TargetGroup(1, 9)], pieces.append, lambda: None))
    for tokens in (32, 48, 64):
        model.progress.layer_computed(0, tokens)
    assert [(piece.first_index, piece.skip_tokens) for piece in pieces] == [(0, 16), (1, 32), (2, 48)]
    assert all(piece.block_ids == model.block_ids for piece in pieces)


def test_threads_that_race_send_nothing_twice() -> None:
    """The executor's thread reports layers while the engine's thread sets targets."""
    for _ in range(30):
        model = Model(6, 16, 64, num_tokens=1000, first_block=2, max_block_layers=3)
        model.computed = [1000] * 6  # the order is not looked at here

        def compute(model: Model = model) -> None:
            for tokens in range(100, 1001, 100):
                for layer in range(6):
                    model.progress.layer_computed(layer, tokens)

        thread = threading.Thread(target=compute)
        thread.start()
        model.progress.start(model.target())
        thread.join(30)
        model.progress.all_computed(1000)
        assert model.num_finished == 1
        model.check_all_sent()
