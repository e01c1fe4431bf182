"""Updates from tensors: for every family, the weights that loading a checkpoint of the same tensors gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from support.engine.tiny_models import MODELS, make_model

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.worker.weights.build import is_redundant
from baton.worker.weights.loading import load_model
from baton.worker.weights.tensor_update import TensorUpdate

CPU = torch.device("cpu")


def opened(name, folder):
    make_model(name, folder)
    loaded = load_model(str(folder), "auto", torch.float32)
    update = TensorUpdate(loaded.config, partial(is_redundant, config=loaded.config))
    return loaded, update, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_an_update_builds_what_a_checkpoint_of_its_tensors_gives(name, tmp_path):
    loaded, update, tensors = opened(name, tmp_path)
    names = sorted(name for name in tensors if "vision" not in name and "projector" not in name)
    update.add({one: tensors[one] for one in names[::2]})
    if len(names) > 1:
        with pytest.raises(Mismatch, match="the update lacks"):
            update.build(torch.float32, CPU)
    update.add({one: tensors[one] for one in names[1::2]})
    ours, theirs = update.build(torch.float32, CPU).tensors(), loaded.weights.tensors()
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


def test_the_digest_follows_the_values_and_what_was_before(tmp_path):
    _, update, tensors = opened("llama", tmp_path)
    update.add(tensors)
    first = update.digest(bytes(16))
    assert len(first) == 16
    assert update.digest(first) != first == update.digest(bytes(16))
    update.add({"model.norm.weight": tensors["model.norm.weight"] * 2})
    assert update.digest(bytes(16)) != first


def test_a_part_with_a_wrong_tensor_is_refused_whole(tmp_path):
    _, update, tensors = opened("llama", tmp_path)
    update.add(tensors)
    before = update.digest(bytes(16))
    with pytest.raises(InvalidRequest, match=r"no tensor model\.layers\.9"):
        update.add({"model.norm.weight": tensors["model.norm.weight"] * 2, "model.layers.9.x": torch.zeros(1)})
    assert update.digest(bytes(16)) == before
