"""The built-in formats by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton.gateway.parsing.grammar.call_syntax import CallSyntax
from baton.gateway.parsing.output_format import ReasoningFormat, ToolFormat
from baton.gateway.parsing.reasoning_formats import granite as granite_reasoning
from baton.gateway.parsing.reasoning_formats.answer_tags import AnswerTagsParser
from baton.gateway.parsing.reasoning_formats.granite import GraniteReasoningParser
from baton.gateway.parsing.reasoning_formats.kept_reasoning import KeptReasoningParser
from baton.gateway.parsing.reasoning_formats.think_tags import ThinkTagsParser
from baton.gateway.parsing.tool_formats import (
    apertus,
    deepseek_v3,
    gemma,
    glm45,
    harmony,
    hermes,
    invoke_tags,
    kimi_k2,
    listed_calls,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
    tagged_pythonic,
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
from baton.gateway.parsing.tool_formats.invoke_tags import (
    DeepSeekV4Parser,
    DsmlParser,
    InvokeParser,
    MiniCpmParser,
    Step3Parser,
)
from baton.gateway.parsing.tool_formats.kimi_k2 import KimiK2Parser
from baton.gateway.parsing.tool_formats.listed_calls import (
    CohereParser,
    GraniteParser,
    HunyuanParser,
    JambaParser,
    Phi4MiniParser,
    XlamParser,
)
from baton.gateway.parsing.tool_formats.llama3_json import Llama3JsonParser
from baton.gateway.parsing.tool_formats.mistral import MistralParser
from baton.gateway.parsing.tool_formats.pythonic import PythonicParser
from baton.gateway.parsing.tool_formats.qwen3_coder import Qwen3CoderParser, SeedOssParser
from baton.gateway.parsing.tool_formats.tagged_pythonic import Lfm2Parser, Olmo3Parser

_THINK, _END_THINK = "<think>", "</think>"
_MISTRAL_THINK, _MISTRAL_END_THINK = "[THINK]", "[/THINK]"
_CALL_TAGS = ("<tool_call>", "</tool_call>")
_HARMONY_TOKENS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.CALL, harmony.CONSTRAIN)
_KIMI_SECTION = (kimi_k2.SECTION,)
_SEED_THINK = ("<seed:think>", "</seed:think>")
_GEMMA_THINK = ("<|channel>thought\n", "<channel|>")
_COHERE_THINK = ("<|START_THINKING|>", "<|END_THINKING|>")
_COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_HARMONY_REASONING = ReasoningFormat(lambda opened: HarmonyParser(), _HARMONY_TOKENS)


def _think(
    opened: bool = False, implicit_ends: tuple[str, ...] = (), tags: tuple[str, str] = (_THINK, _END_THINK)
) -> ReasoningFormat:
    return ReasoningFormat(
        lambda is_open: ThinkTagsParser(*tags, opened=is_open, implicit_ends=implicit_ends),
        special_tokens=(*tags, *implicit_ends),
        open_tag=tags[0],
        close_tag=tags[1],
        opened=opened,
    )


def _objects(parser: type[HermesParser], syntax: CallSyntax) -> ToolFormat:
    """Returns the format of JSON objects between tags."""
    tags = (parser.open_tag, parser.subtag, parser.close_tag)
    return ToolFormat(parser, tuple(tag for tag in tags if tag), starts=tags[:1], syntax=syntax)


def _answered(
    opened: bool, answer_tags: tuple[str, str], tags: tuple[str, str] = (_THINK, _END_THINK)
) -> ReasoningFormat:
    """Returns the format of reasoning tags before an answer that may have tags of its own."""
    return replace(
        _think(opened, tags=tags), new_parser=lambda is_open: AnswerTagsParser(*tags, answer_tags, opened=is_open)
    )


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
    "gpt-oss": ToolFormat(HarmonyParser, _HARMONY_TOKENS, has_reasoning=True, output_form=harmony.output_form),
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
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": _think(opened=True),
    "qwen3": _think(),
    "glm45": _think(),
    "kimi_k2": _think(implicit_ends=_KIMI_SECTION),
    "mistral": ReasoningFormat(
        lambda opened: ThinkTagsParser(_MISTRAL_THINK, _MISTRAL_END_THINK, opened=opened, anywhere=True),
        special_tokens=(_MISTRAL_THINK, _MISTRAL_END_THINK),
        open_tag=_MISTRAL_THINK,
        close_tag=_MISTRAL_END_THINK,
    ),
    "gpt-oss": _HARMONY_REASONING,
    "openai_gptoss": _HARMONY_REASONING,
    "deepseek_v3": _think(),
    "deepseek_v4": _think(),
    "glm47": _think(),
    "nemotron_v3": _think(opened=True),
    "step3": _think(opened=True),
    "step3p5": _think(opened=True),
    "olmo3": _think(opened=True),
    "mimo": _think(),
    "ernie45": _answered(True, ("<response>", "</response>")),
    "hunyuan_a13b": _answered(False, ("<answer>", "</answer>")),
    "hy_v3": _think(),
    "cohere_command3": replace(
        _answered(False, _COHERE_ANSWER, _COHERE_THINK), special_tokens=(*_COHERE_THINK, *_COHERE_ANSWER)
    ),
    "minimax_m2": _think(opened=True),
    "minimax_m2_append_think": replace(_think(opened=True), new_parser=KeptReasoningParser),
    "holo2": _think(opened=True),
    "poolside_v1": _think(),
    "seed_oss": _think(tags=_SEED_THINK),
    "gemma4": ReasoningFormat(
        lambda opened: ThinkTagsParser(*_GEMMA_THINK, opened=opened, implicit_ends=Gemma4Parser.tags[:1]),
        special_tokens=("<|channel>", "<channel|>"),
        open_tag=_GEMMA_THINK[0],
        close_tag=_GEMMA_THINK[1],
    ),
    "granite": ReasoningFormat(
        GraniteReasoningParser, open_tag=granite_reasoning.STARTS[0], close_tag=granite_reasoning.ENDS[0]
    ),
}
