"""Tensors stream from files into views: cut into reads, converted, transposed, in bounded memory, with progress."""

from __future__ import annotations

import io
import logging
import threading
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.weights.stream.pieces import Coding, Fill, Place, planned_reads
from baton.worker.weights.stream.progress import LoadProgress
from baton.worker.weights.stream.streaming import StreamSettings, TensorStream

CPU = torch.device("cpu")
SMALL = StreamSettings(num_readers=3, read_bytes=64)


def stored(path: Path, *tensors: Tensor, gap: int = 0) -> list[Place]:
    """Writes tensors one behind the other, and returns their places."""
    places, data = [], bytearray()
    for tensor in tensors:
        places.append(Place(path, len(data), Coding(tensor.dtype)))
        data += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + bytes(gap)
    path.write_bytes(data)
    return places


def filled(places: list[Place], views: list[Tensor], settings: StreamSettings = SMALL) -> None:
    stream = TensorStream(CPU, settings)
    for place, view in zip(places, views, strict=True):
        stream.add(place, view)
    stream.run()


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=6),
    stored_as=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    wanted=st.sampled_from([torch.float32, torch.bfloat16]),
    read_bytes=st.integers(4, 200),
    gap=st.integers(0, 3),
)
def test_views_hold_the_files_elements_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    stored_as: torch.dtype,
    wanted: torch.dtype,
    read_bytes: int,
    gap: int,
) -> None:
    tensors = [torch.randn(shape).to(stored_as) for shape in shapes]
    places = stored(tmp_path_factory.mktemp("stream") / "file", *tensors, gap=gap)
    straight = [torch.empty(shape, dtype=wanted) for shape in shapes]
    reversed_dims = [torch.empty(shape[::-1], dtype=wanted) for shape in shapes]
    settings = StreamSettings(num_readers=2, read_bytes=read_bytes)
    filled(places * 2, [*straight, *(one.permute(*range(one.dim())[::-1]) for one in reversed_dims)], settings)
    for tensor, one, other in zip(tensors, straight, reversed_dims, strict=True):
        assert torch.equal(one, tensor.to(wanted))
        assert torch.equal(other.permute(*range(other.dim())[::-1]), tensor.to(wanted))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_what_is_converted_in_several_parts_is_whole(tmp_path: Path, wanted: torch.dtype) -> None:
    tensor = torch.arange(3 * 100_003).view(3, -1).remainder(251).to(torch.float16)
    places = stored(tmp_path / "file", tensor)
    into = torch.full(tensor.shape, torch.nan, dtype=wanted)
    filled(places, [into], StreamSettings(num_readers=2, read_bytes=1 << 20))
    assert torch.equal(into, tensor.to(wanted))


@pytest.mark.parametrize("shape", [(40,), (6, 40), (2, 3, 40)])
@pytest.mark.parametrize("read_bytes", [1, 5, 12, 30, 1000])
def test_blocks_are_decoded_however_reads_are_cut(tmp_path: Path, shape: tuple[int, ...], read_bytes: int) -> None:
    # Blocks of 4 values: a scale of a byte, and a byte a value.
    blocks = torch.randint(0, 16, (prod(shape) // 4, 5), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(blocks.numpy().tobytes())

    def decode(data: Tensor) -> Tensor:
        parts = data.view(-1, 5).float()
        return (parts[:, :1] * parts[:, 1:]).flatten()

    into = torch.empty(shape)
    coding = Coding(torch.float32, 4, 5, decode)
    filled([Place(tmp_path / "file", 0, coding)], [into], StreamSettings(2, max(5, read_bytes)))
    assert torch.equal(into, decode(blocks.flatten()).view(shape))


def test_reads_are_bounded_join_neighbours_and_take_files_by_turns(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    fills = [
        Fill(Place(one, start, Coding(torch.uint8)), torch.empty(8, dtype=torch.uint8)) for start in (16, 0, 8, 24)
    ]
    fills.append(Fill(Place(two, 0, Coding(torch.uint8)), torch.empty(40, dtype=torch.uint8)))
    reads = [(read.path.name, read.start, read.num_bytes, len(read.fills)) for read in planned_reads(fills, 20)]
    assert reads == [("a", 0, 16, 2), ("b", 0, 20, 1), ("a", 16, 16, 2), ("b", 20, 20, 1)]


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    (place,) = stored(tmp_path / "weights", torch.zeros(64))
    (tmp_path / "weights").write_bytes(bytes(100))
    with pytest.raises(
        InvalidRequest, match=r"weights ends before byte \d+, which its header describes: it was changed"
    ):
        filled([place], [torch.empty(64)])


def test_no_reader_is_left_after_an_error(tmp_path: Path) -> None:
    places = stored(tmp_path / "weights", torch.zeros(512), torch.zeros(512))
    (tmp_path / "weights").write_bytes(bytes(2048))
    before = set(threading.enumerate())
    with pytest.raises(InvalidRequest):
        filled(places, [torch.empty(512), torch.empty(512)])
    assert before.issuperset(threading.enumerate())


def test_an_error_of_the_report_ends_the_readers(tmp_path: Path) -> None:
    (place,) = stored(tmp_path / "weights", torch.zeros(512))
    stream = TensorStream(CPU, SMALL)
    stream.add(place, torch.empty(512))
    before = set(threading.enumerate())

    def report(done: int, total: int, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.run(report)
    assert before.issuperset(threading.enumerate())


def test_progress_and_result_count_the_bytes_of_the_files(tmp_path: Path) -> None:
    (place,) = stored(tmp_path / "weights", torch.zeros(100, dtype=torch.bfloat16))
    stream = TensorStream(CPU, SMALL)
    stream.add(place, torch.empty(100))
    seen: list[tuple[int, int]] = []
    streamed = stream.run(lambda done, total, seconds: seen.append((done, total)))
    assert streamed.num_bytes == 200
    assert seen[-1] == (200, 200)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def test_a_terminal_shows_a_bar_that_is_removed_at_the_end(terminal: Terminal) -> None:
    progress = LoadProgress(terminal)
    progress(4_000_000_000, 16_000_000_000, 2.0)
    assert "weights [#######.......................] 4.0 of 16.0 GB, 2.00 GB/s" in terminal.getvalue()
    progress.end()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_log_has_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    progress = LoadProgress(io.StringIO())
    with caplog.at_level(logging.INFO):
        for tenths in range(1, 60):
            progress(tenths * 10**8, 6 * 10**9, tenths / 10)
        progress(6 * 10**9, 6 * 10**9, 6.0)
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 2.0 of 6.0 GB, 1.00 GB/s",
        "weights: 4.0 of 6.0 GB, 1.00 GB/s",
    ]
