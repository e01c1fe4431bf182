"""The worked examples of the contributing pages work, and are the code's own."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from support.engine import tiny_models
from support.gateway.parsing_harness import parse

from baton.gateway.parsing.format_choice import FormatFlags, choose_format
from baton.gateway.parsing.recognition import Traits
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.worker.models.families.granite import granite
from baton.worker.models.families.llama import phi3
from baton.worker.models.families.olmo import olmo2
from baton.worker.quantization import unquantized

PAGES = Path(__file__).parents[2] / "docs" / "contributing"


def _examples(page: str) -> list[str]:
    """The page's Python texts."""
    return [found.strip() for found in re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)]


def test_the_tool_parser_of_the_page_reads_calls(tmp_path):
    path = tmp_path / "bang.py"
    path.write_text(_examples("add-a-tool-parser.md")[0])
    chosen = choose_format(FormatFlags(tools="bang", plugin=str(path)), Traits())
    parser = chosen.output_parsing(ToolUse((Tool("f"),), ToolMode.AUTO), "").new_parser()
    parsed = parse(parser, ["Well. ", '!f{"a":', "1}"])
    assert (parsed.content, parsed.calls) == ("Well.", [("f", '{"a":1}')])


def test_the_families_of_the_page_are_those_in_the_code():
    families = [example for example in _examples("add-a-model.md") if example.startswith("ARCHITECTURE")]
    for module, example in zip((phi3, granite, olmo2), families, strict=True):
        assert example in inspect.getsource(module)


def test_the_test_rows_of_the_page_are_those_in_the_tests():
    rows = [example for example in _examples("add-a-model.md") if example.startswith('"')]
    assert len(rows) == 3
    for row in rows:
        assert row in inspect.getsource(tiny_models)


def test_the_loader_of_the_page_is_the_one_in_the_code():
    (example,) = _examples("add-a-weight-format.md")
    assert textwrap.indent(example, "    ") in inspect.getsource(unquantized)
