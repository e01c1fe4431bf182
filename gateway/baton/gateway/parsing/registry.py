"""The built-in formats of tool calls by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton.gateway.parsing.grammar.call_syntax import CallSyntax
from baton.gateway.parsing.output_format import ToolFormat
from baton.gateway.parsing.tool_formats import (
    apertus,
    deepseek_v3,
    gemma,
    glm45,
    harmony,
    hermes,
    inkling,
    invoke_tags,
    kimi_k2,
    kimi_k3,
    llama3_json,
    minimax_m3,
    mistral,
    qwen3_coder,
    solar_open2,
)
from baton.gateway.parsing.tool_formats.apertus import ApertusParser
from baton.gateway.parsing.tool_formats.deepseek_v3 import DeepSeekV3Parser
from baton.gateway.parsing.tool_formats.gemma import FunctionGemmaParser, Gemma4Parser
from baton.gateway.parsing.tool_formats.glm45 import Glm45Parser, Hunyuan3Parser
from baton.gateway.parsing.tool_formats.harmony import HarmonyParser
from baton.gateway.parsing.tool_formats.hermes import (
    CallLinesParser,
    GigaChatParser,
    Granite20bParser,
    HermesParser,
    InternLmParser,
    LongcatParser,
)
from baton.gateway.parsing.tool_formats.inkling import InklingParser
from baton.gateway.parsing.tool_formats.invoke_tags import (
    DeepSeekV4Parser,
    DsmlParser,
    InvokeParser,
    MiniCpmParser,
    Step3Parser,
)
from baton.gateway.parsing.tool_formats.kimi_k2 import KimiK2Parser
from baton.gateway.parsing.tool_formats.kimi_k3 import KimiK3Parser
from baton.gateway.parsing.tool_formats.lists import listed_calls, pythonic, tagged_pythonic
from baton.gateway.parsing.tool_formats.lists.listed_calls import (
    CohereParser,
    GraniteParser,
    HunyuanParser,
    JambaParser,
    Phi4MiniParser,
    XlamParser,
)
from baton.gateway.parsing.tool_formats.lists.pythonic import PythonicParser
from baton.gateway.parsing.tool_formats.lists.tagged_pythonic import Lfm2Parser, Olmo3Parser
from baton.gateway.parsing.tool_formats.llama3_json import Llama3JsonParser
from baton.gateway.parsing.tool_formats.minimax_m3 import MiniMaxM3Parser
from baton.gateway.parsing.tool_formats.mistral import MistralParser
from baton.gateway.parsing.tool_formats.qwen3_coder import Qwen3CoderParser, SeedOssParser
from baton.gateway.parsing.tool_formats.solar_open2 import SolarOpen2Parser

_CALL_TAGS = ("<tool_call>", "</tool_call>")
_KIMI_SECTION = (kimi_k2.SECTION,)


def _objects(parser: type[HermesParser], syntax: CallSyntax) -> ToolFormat:
    """Returns the format of JSON objects between tags."""
    tags = (parser.open_tag, parser.subtag, parser.close_tag)
    return ToolFormat(parser, tuple(tag for tag in tags if tag), starts=tags[:1], syntax=syntax)


_TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _objects(HermesParser, hermes.SYNTAX),
    "llama3_json": ToolFormat(
        Llama3JsonParser,
        (*llama3_json.TAGS, llama3_json.END_TAG),
        starts=llama3_json.TAGS,
        bare_start=llama3_json.bare_start,
        syntax=llama3_json.SYNTAX,
    ),
    "mistral": ToolFormat(
        MistralParser, (mistral.CALLS, mistral.ARGS, mistral.CALL_ID), starts=(mistral.CALLS,), syntax=mistral.SYNTAX
    ),
    "qwen3_coder": ToolFormat(Qwen3CoderParser, _CALL_TAGS, starts=_CALL_TAGS[:1], syntax=qwen3_coder.SYNTAX),
    "qwen3_xml": ToolFormat(Qwen3CoderParser, _CALL_TAGS, starts=_CALL_TAGS[:1], syntax=qwen3_coder.SYNTAX),
    "deepseek_v3": ToolFormat(
        DeepSeekV3Parser,
        (
            deepseek_v3.CALLS,
            deepseek_v3.END_CALLS,
            deepseek_v3.CALL,
            deepseek_v3.SEP,
            deepseek_v3.END_CALL,
        ),
        starts=(deepseek_v3.CALLS,),
        syntax=deepseek_v3.SYNTAX,
    ),
    "kimi_k2": ToolFormat(
        KimiK2Parser,
        (kimi_k2.SECTION, kimi_k2.END_SECTION, kimi_k2.CALL, kimi_k2.ARGUMENTS, kimi_k2.END_CALL),
        starts=_KIMI_SECTION,
        syntax=kimi_k2.SYNTAX,
    ),
    "glm45": ToolFormat(
        Glm45Parser,
        (*_CALL_TAGS, *glm45.TAGS),
        starts=_CALL_TAGS[:1],
        syntax=glm45.SYNTAX,
    ),
    "gpt-oss": ToolFormat(
        HarmonyParser,
        harmony.TOKENS,
        has_reasoning=True,
        answer_mark=harmony.ANSWER,
        output_form=harmony.output_form,
        forced_form=harmony.forced_form,
    ),
    "pythonic": ToolFormat(
        PythonicParser,
        (pythonic.START, pythonic.END),
        starts=(pythonic.START,),
        bare_start=pythonic.bare_start,
        syntax=pythonic.SYNTAX,
    ),
    "granite": ToolFormat(
        GraniteParser,
        (*listed_calls.GRANITE_MARKS, "</tool_call>"),
        starts=listed_calls.GRANITE_MARKS,
        syntax=listed_calls.GRANITE_SYNTAX,
    ),
    "phi4_mini_json": ToolFormat(Phi4MiniParser, starts=(listed_calls.PHI_MARK,), syntax=listed_calls.PHI_SYNTAX),
    "xlam": ToolFormat(
        XlamParser,
        listed_calls.XLAM_MARKS,
        starts=listed_calls.XLAM_MARKS,
        bare_start=listed_calls.bare_list,
        syntax=listed_calls.XLAM_SYNTAX,
    ),
    "functiongemma": ToolFormat(
        FunctionGemmaParser,
        (*FunctionGemmaParser.tags, FunctionGemmaParser.quote),
        starts=FunctionGemmaParser.tags[:1],
        syntax=gemma.FUNCTION_GEMMA_SYNTAX,
    ),
    "gemma4": ToolFormat(
        Gemma4Parser,
        (*Gemma4Parser.tags, Gemma4Parser.quote),
        starts=Gemma4Parser.tags[:1],
        syntax=gemma.GEMMA4_SYNTAX,
    ),
    "minimax_m2": ToolFormat(
        InvokeParser, InvokeParser.section, starts=InvokeParser.section[:1], syntax=invoke_tags.MINIMAX_SYNTAX
    ),
    "deepseek_v32": ToolFormat(
        DsmlParser, DsmlParser.section, starts=DsmlParser.section[:1], syntax=invoke_tags.DSML_SYNTAX
    ),
    "seed_oss": ToolFormat(
        SeedOssParser, qwen3_coder.SEED_TAGS, starts=qwen3_coder.SEED_TAGS[:1], syntax=qwen3_coder.SEED_SYNTAX
    ),
    "deepseek_v4": ToolFormat(
        DeepSeekV4Parser,
        DeepSeekV4Parser.section,
        starts=DeepSeekV4Parser.section[:1],
        syntax=invoke_tags.DEEPSEEK_V4_SYNTAX,
    ),
    "step3": ToolFormat(
        Step3Parser,
        (*Step3Parser.section, Step3Parser.call, Step3Parser.sep, Step3Parser.end_call),
        starts=(Step3Parser.section[0], Step3Parser.call),
        syntax=invoke_tags.STEP3_SYNTAX,
    ),
    "minicpm5": ToolFormat(MiniCpmParser, starts=("<function",), syntax=invoke_tags.MINICPM_SYNTAX),
    "gigachat3": ToolFormat(
        GigaChatParser,
        (GigaChatParser.open_tag, GigaChatParser.separator, GigaChatParser.role_tag),
        starts=(GigaChatParser.open_tag, GigaChatParser.role_tag),
        syntax=hermes.GIGACHAT_SYNTAX,
    ),
    "longcat": _objects(LongcatParser, hermes.LONGCAT_SYNTAX),
    "granite-20b-fc": _objects(Granite20bParser, hermes.GRANITE_20B_SYNTAX),
    "internlm": _objects(InternLmParser, hermes.INTERNLM_SYNTAX),
    "minimax": _objects(CallLinesParser, hermes.LINES_SYNTAX),
    "jamba": ToolFormat(
        JambaParser, listed_calls.SECTION, starts=listed_calls.SECTION[:1], syntax=listed_calls.SECTION_SYNTAX
    ),
    "hunyuan_a13b": ToolFormat(
        HunyuanParser, listed_calls.SECTION, starts=listed_calls.SECTION[:1], syntax=listed_calls.SECTION_SYNTAX
    ),
    "cohere_command3": ToolFormat(
        CohereParser, listed_calls.ACTION, starts=listed_calls.ACTION[:1], syntax=listed_calls.COHERE_SYNTAX
    ),
    "apertus": ToolFormat(ApertusParser, apertus.TAGS, starts=apertus.TAGS[:1], syntax=apertus.SYNTAX),
    "hy_v3": ToolFormat(
        Hunyuan3Parser,
        (*glm45.SECTION, *_CALL_TAGS, glm45.SEP, *glm45.TAGS),
        starts=(glm45.SECTION[0], _CALL_TAGS[0]),
        syntax=glm45.HUNYUAN_3_SYNTAX,
    ),
    "lfm2": ToolFormat(Lfm2Parser, Lfm2Parser.tags, starts=Lfm2Parser.tags[:1], syntax=tagged_pythonic.LFM2_SYNTAX),
    "olmo3": ToolFormat(
        Olmo3Parser, Olmo3Parser.tags, starts=Olmo3Parser.tags[:1], syntax=tagged_pythonic.OLMO3_SYNTAX
    ),
    "solar_open2": ToolFormat(
        SolarOpen2Parser, solar_open2.TAGS, starts=solar_open2.TAGS[:1], syntax=solar_open2.SYNTAX
    ),
    "minimax_m3": ToolFormat(
        MiniMaxM3Parser, minimax_m3.TOKENS, starts=minimax_m3.SECTION[:1], syntax=minimax_m3.SYNTAX
    ),
    "kimi_k3": ToolFormat(
        KimiK3Parser, (kimi_k3.OPEN, kimi_k3.CLOSE, kimi_k3.SEP), starts=kimi_k3.TOOLS[:1], syntax=kimi_k3.SYNTAX
    ),
    "inkling": ToolFormat(
        InklingParser,
        inkling.TOKENS,
        has_reasoning=True,
        answer_mark=inkling.TEXT,
        output_form=inkling.output_form,
        forced_form=inkling.forced_form,
        starts=(inkling.CALL,),
    ),
}
# Other names, and variants that differ in what models write.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    **_TOOL_FORMATS,
    "deepseek_v31": replace(_TOOL_FORMATS["deepseek_v3"], syntax=deepseek_v3.V31_SYNTAX),
    "glm47": replace(_TOOL_FORMATS["glm45"], syntax=glm45.syntax_of("")),
    "llama4_pythonic": _TOOL_FORMATS["pythonic"],
    "openai": _TOOL_FORMATS["gpt-oss"],
    "ernie45": _TOOL_FORMATS["hermes"],
    "granite4": _TOOL_FORMATS["hermes"],
    "llama4_json": _TOOL_FORMATS["llama3_json"],
    "step3p5": _TOOL_FORMATS["qwen3_coder"],
    "mimo": _TOOL_FORMATS["qwen3_coder"],
    "poolside_v1": _TOOL_FORMATS["glm45"],
    "cohere_command4": _TOOL_FORMATS["cohere_command3"],
}
