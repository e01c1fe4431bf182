"""Tensors stream through pinned buffers to the GPU: converted, transposed and in bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.worker.weights.files.safetensors_file import SafetensorsFile
from baton.worker.weights.stream.pieces import Coding, Place
from baton.worker.weights.stream.streaming import StreamSettings, TensorStream

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("read_bytes", [1 << 12, 1 << 20])
def test_views_on_the_device_hold_the_files_elements(tmp_path: Path, wanted: torch.dtype, read_bytes: int) -> None:
    torch.manual_seed(0)
    tensors = {f"t{size}": torch.randn(size, 2 * size + 1).bfloat16() for size in (1, 7, 64, 300)}
    save_file(tensors, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    straight = {name: torch.empty(one.shape, dtype=wanted, device=CUDA) for name, one in tensors.items()}
    transposed = {name: torch.empty(one.t().shape, dtype=wanted, device=CUDA) for name, one in tensors.items()}
    stream = TensorStream(CUDA, StreamSettings(num_readers=3, read_bytes=read_bytes))
    for name, entry in file.entries.items():
        place = Place(file.path, entry.start, Coding(torch.bfloat16))
        stream.add(place, straight[name])
        stream.add(place, transposed[name].t())
    stream.run()
    file.close()
    for name, tensor in load_file(tmp_path / "model.safetensors", device="cuda").items():
        assert torch.equal(straight[name], tensor.to(wanted))
        assert torch.equal(transposed[name].t(), tensor.to(wanted))


def test_the_device_holds_no_second_copy_of_what_is_read(tmp_path: Path) -> None:
    tensor = torch.randn(1 << 25).bfloat16()
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    into = torch.empty(tensor.shape, dtype=torch.float32, device=CUDA)
    settings = StreamSettings(num_readers=2, read_bytes=1 << 20)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stream = TensorStream(CUDA, settings)
    stream.add(Place(file.path, file.entries["t"].start, Coding(torch.bfloat16)), into)
    stream.run()
    file.close()
    assert torch.cuda.max_memory_allocated() - before <= settings.staging_bytes
    assert torch.equal(into, tensor.to(CUDA).float())
