"""The worked examples of the contributing pages work, and are the code's own."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from parsing_harness import parse

from baton.gateway.parsing.format_choice import FormatFlags, choose_format
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.worker.models.families import qwen3

PAGES = Path(__file__).parents[2] / "docs" / "contributing"


def _python(page: str) -> str:
    return re.search(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)[1]


def test_the_tool_parser_of_the_page_reads_calls(tmp_path):
    path = tmp_path / "bang.py"
    path.write_text(_python("add-a-tool-parser.md"))
    chosen = choose_format(FormatFlags(tools="bang", plugin=str(path)), [])
    parser = chosen.reading(ToolUse((Tool("f"),), ToolMode.AUTO), "").new_parser()
    parsed = parse(parser, ["Well. ", '!f{"a":', "1}"])
    assert (parsed.content, parsed.calls) == ("Well.", [("f", '{"a":1}')])


def test_the_family_of_the_page_is_the_one_in_the_code():
    assert _python("add-a-model.md").strip() in inspect.getsource(qwen3)
