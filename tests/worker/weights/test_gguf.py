"""GGUF files run as Transformers runs them, whatever their types; and what is wrong with one is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.engine.random_vectors import with_random_vectors
from support.engine.tiny_models import MODELS, prompts
from support.engine.tiny_shape import SHAPE
from support.gguf.files import write_gguf
from support.gguf.runs import check_equal, outputs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from baton.model_folder.gguf.header import parts_of
from baton.rpc.errors import InvalidRequest, ServiceError, Unsupported
from baton.worker.weights.loading import load_model, read_config

# Rows of whole blocks of 256 values, which k-quants have.
WIDE = {**SHAPE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_model(name: str) -> PreTrainedModel:
    return with_random_vectors(MODELS[name], seed=3)


def wide_model() -> PreTrainedModel:
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**WIDE)).eval()


def transformers_of(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.F16, Kind.BF16])
def test_a_type_is_dequantized_as_transformers_does(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", wide_model(), kind)
    check_equal(path, transformers_of(path))


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_a_k_quant_is_dequantized_as_transformers_does(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", wide_model(), kind)
    check_equal(path, transformers_of(path))


def test_a_split_file_and_a_folder_are_read_like_one_file(tmp_path: Path) -> None:
    model = random_model("llama")
    whole = write_gguf(tmp_path / "model.gguf", model)
    folder = tmp_path / "split"
    folder.mkdir()
    split(whole, folder / "model-00001-of-00002.gguf")
    asked = prompts(2, 20)
    assert outputs(folder, asked) == outputs(folder / "model-00002-of-00002.gguf", asked) == outputs(whole, asked)
    (folder / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(InvalidRequest, match=r"model-00002-of-00002\.gguf is missing: .* is one of 2 parts"):
        read_config(str(folder), "auto")


def split(whole: Path, first: Path) -> None:
    """Writes the file in two parts, the second without metadata."""
    reader = gguf.GGUFReader(whole)
    for number, part in enumerate(parts_of(first)):
        writer = gguf.GGUFWriter(part, "llama")
        for key, value in reader.fields.items():
            if not number and not key.startswith("GGUF.") and key != "general.architecture":
                sub_type = value.types[-1] if len(value.types) > 1 else None
                writer.add_key_value(key, value.contents(), value.types[0], sub_type)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def refused(path: Path) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        load_model(str(path), "auto", torch.float32)
    assert str(path) in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("llama.block_count", "llama.block_count is missing; it must be a positive integer"),
        ("llama.attention.head_count", "llama.attention.head_count is missing"),
        ("llama.attention.layer_norm_rms_epsilon", "layer_norm_rms_epsilon is missing; it must be a number above 0"),
        ("tokenizer.ggml.model", "tokenizer.ggml.model is missing; it must be a string"),
        ("tokenizer.ggml.tokens", "tokenizer.ggml.tokens is missing; it must be a list of strings"),
        ("tokenizer.ggml.merges", "tokenizer.ggml.merges is missing"),
        ("tokenizer.ggml.pre", "tokenizer.ggml.pre is missing"),
    ],
)
def test_missing_metadata_is_named(without: str, message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), without=[without])
    error = refused(path)
    assert isinstance(error, InvalidRequest)
    assert message in error.message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"general__architecture": "mamba"},
            "general.architecture is 'mamba'; GGUF files can be loaded of llama, qwen2, qwen2moe, qwen3",
        ),
        ({"llama__expert_count": 8}, "llama.expert_used_count is missing; it must be a positive integer"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count is 8; it must be the size of a head (16)"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope'; it must be none, linear"),
        (
            {"llama__attention__value_length": 8},
            "llama.attention.value_length is 8; it must be attention.key_length (16)",
        ),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert'; it must be gpt2 or llama"),
        ({"tokenizer__ggml__pre": "viking"}, "tokenizer.ggml.pre is 'viking'; it must be one of gpt-2"),
        ({"tokenizer__ggml__merges": ["a"]}, "tokenizer.ggml.merges has 'a'; it must be two tokens"),
        ({"tokenizer__ggml__tokens": ["a"] * 160}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"tokenizer__ggml__eos_token_id": 160}, "eos_token_id is 160; it must be a token id below 160"),
        (
            {"tokenizer__ggml__tokens": [f"t{i}" for i in range(161)], "tokenizer__ggml__token_type": [1] * 161},
            "tokenizer.ggml.tokens has 161 tokens; token_embd.weight has rows for 160",
        ),
    ],
)
def test_what_is_not_supported_or_wrong_is_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), **changed)
    assert message in refused(path).message


def test_a_quantization_type_that_cannot_be_dequantized_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", wide_model(), Kind.Q8_0)
    _replace_once(path, b"blk.0.attn_k.weight", Kind.Q8_0, Kind.Q8_1)
    with pytest.raises(
        Unsupported, match=r"blk\.0\.attn_k\.weight has the quantization type Q8_1; it must be one of F32"
    ):
        load_model(str(path), "auto", torch.float32)
    _replace_once(path, b"blk.0.attn_k.weight", Kind.Q8_1, 77)
    with pytest.raises(
        Unsupported, match=r"blk\.0\.attn_k\.weight has the quantization type 77; it must be one of F32"
    ):
        load_model(str(path), "auto", torch.float32)


def _replace_once(path: Path, name: bytes, old: int, new: int) -> None:
    """Changes the type of a matrix in the header."""
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions, and both
    assert int.from_bytes(data[at : at + 4], "little") == old
    data[at : at + 4] = int(new).to_bytes(4, "little")
    path.write_bytes(data)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), llama__block_count=4)
    with pytest.raises(InvalidRequest, match=r"model\.gguf: no file holds the tensor blk\.3\.\w+\.weight \["):
        load_model(str(path), "auto", torch.float32)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), llama__feed_forward_length=95)
    with pytest.raises(
        InvalidRequest, match=r"blk\.0\.ffn_gate\.weight has shape \[96, 64\]; by the metadata it must be \[95, 64\]"
    ):
        load_model(str(path), "auto", torch.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 a zip file", "is not a GGUF file: it does not begin with GGUF"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "has GGUF version 1; it must be 2 or 3"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "has a broken GGUF header at byte"),
        (b"GGUF\x03\x00\x00\x00\x01", "has a broken GGUF header at byte"),
    ],
)
def test_a_file_that_is_no_gguf_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert message in refused(path).message


@pytest.mark.parametrize("share", [0.3, 0.97])
def test_a_truncated_file_is_refused(share: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"))
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert "download or copy it again" in refused(path).message


def test_a_folder_with_several_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest, match=r"has 2 GGUF models: a\.gguf, b\.gguf; name one file"):
        read_config(str(tmp_path), "auto")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), llama__context_length=512)
    assert read_config(str(path), "auto").max_position_embeddings == 512
    write_gguf(path, random_model("llama"), llama__context_length=1024)
    assert read_config(str(path), "auto").max_position_embeddings == 1024


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(Unsupported, match=r"pip install 'baton-inference\[gguf\]'"):
        load_model(str(path), "auto", torch.float32)
