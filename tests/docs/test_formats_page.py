"""The page of weight formats has every family and format, and says what loads say."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import format_cells
import formats_page
import pytest
from support.engine.packed import cells

from baton.rpc.errors import InvalidRequest
from baton.worker.models.registry import parse_config
from baton.worker.models.supported.families import FAMILIES
from baton.worker.quantization.formats.table import FORMATS

ROOT = Path(__file__).parents[2]


@cache
def matrix():
    return formats_page.matrix(ROOT)


@cache
def page_text():
    return formats_page.formats_page(ROOT)


def test_the_page_has_every_family_and_every_format():
    page = page_text()
    for family in FAMILIES.values():
        assert (f"\n| `{family.architecture}` |" in page) is family.generates, family.architecture
    for name in FORMATS:
        assert f"\n| `{name}` |" in page, name
    assert set(formats_page.SETTINGS) == set(FORMATS) - {"gguf"}
    named = formats_page.PRODUCTS_TEST, formats_page.FAMILIES_TEST, format_cells.FOUR_BITS_TEST
    for path in (*formats_page.TESTS.values(), *named):
        assert (ROOT / path).is_file(), path
        assert f"`{path}`" in page


def test_every_format_has_goldens_of_logits():
    forms = {one.form for one in cells.cells()}
    named = {cells.settings_of(form)["quant_method"] for form in forms if not cells.is_gguf(form)}
    assert named | {"gguf"} == set(FORMATS)


def test_the_page_has_a_row_of_every_cell_with_its_test():
    rows = page_text().splitlines()
    for one in cells.cells():
        (row,) = (row for row in rows if f"`test_logits_by_format[{one.name}]`" in row)
        assert row.startswith(f"| `{one.form}` | cpu")
        assert f"{cells.BOUND:g}" in row
    for one in cells.refused_cells():
        (row,) = (row for row in rows if f"`test_logits_by_format[{one.name}]`" in row)
        assert row.startswith(f"| `{one.form}` | refused: {cells.CLASSES[one.model].refused[one.form]}")


@pytest.mark.parametrize(
    ("name", "besides"),
    [
        ("fp8", ""),
        ("compressed-tensors", "heads, embeddings"),
        ("gptq", "heads"),
        ("auto-round", "heads"),
        ("gguf", "heads, embeddings"),
        ("mxfp4", ""),
    ],
)
def test_the_page_says_which_formats_have_packed_heads_and_embeddings(name, besides):
    (row,) = (row for row in page_text().splitlines() if row.startswith(f"| `{name}` | ") and row.endswith("py` |"))
    assert row.split(" | ")[2] == besides


@pytest.mark.parametrize(
    ("name", "form", "executors"),
    [
        ("dense", "awq", ("cpu", "cuda")),
        ("dense", "bitsandbytes-nf4", ("cpu", "cuda")),
        ("experts", "fp8-blocks", ("cpu", "cuda")),
        ("experts", "fp8-blocks-across-parts", ("cpu",)),  # gates and ups share no matrix
        ("experts", "gptq-order", ("cpu", "cuda")),
        ("gpt-oss", "mxfp4", ("cpu", "cuda")),
    ],
)
def test_a_class_in_a_format_runs_where_its_kernels_are(name, form, executors):
    assert format_cells.executors_of_cell(cells, name, form) == executors


@pytest.mark.parametrize(
    ("architecture", "name", "executors"),
    [
        ("LlamaForCausalLM", "compressed-tensors", ("cpu", "cuda")),
        ("Qwen2ForCausalLM", "bitsandbytes", ("cpu", "cuda")),
        ("Gemma3ForCausalLM", "awq", ("cpu", "cuda")),
        ("GPT2LMHeadModel", "gptq", ()),  # keeps matrices by columns
        ("GptOssForCausalLM", "fp8", ()),  # its experts alternate
        ("LlamaForCausalLM", "mxfp4", ()),  # only experts are packed
    ],
)
def test_a_cell_is_what_is_known_of_the_family(architecture, name, executors):
    assert matrix()[architecture][name] == executors


def test_families_that_read_no_format_are_refused_by_name():
    configs = formats_page.raw_configs(ROOT)
    without = [name for name, by_format in matrix().items() if not any(by_format.values())]
    assert without
    for architecture in without:
        settings = {"quant_method": "awq", **formats_page.SETTINGS["awq"]}
        with pytest.raises(InvalidRequest, match="stores linears in another order than weight formats"):
            parse_config({**configs[architecture], "quantization_config": settings}, "config.json")
