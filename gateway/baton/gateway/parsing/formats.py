"""The built-in formats by name, and which of them a model's chat template speaks of."""

from __future__ import annotations

from collections.abc import Mapping

from baton.gateway.parsing import (
    deepseek_v3,
    glm45,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from baton.gateway.parsing.deepseek_v3 import DeepSeekV3Parser
from baton.gateway.parsing.glm45 import Glm45Parser
from baton.gateway.parsing.harmony import HarmonyParser
from baton.gateway.parsing.hermes import HermesParser
from baton.gateway.parsing.kimi_k2 import KimiK2Parser
from baton.gateway.parsing.llama3_json import Llama3JsonParser
from baton.gateway.parsing.mistral import MistralParser
from baton.gateway.parsing.output_format import ReasoningFormat, ToolFormat
from baton.gateway.parsing.pythonic import PythonicParser
from baton.gateway.parsing.qwen3_coder import Qwen3CoderParser
from baton.gateway.parsing.think_tags import ThinkTagsParser

_THINK, _END_THINK = "<think>", "</think>"
_MISTRAL_THINK, _MISTRAL_END_THINK = "[THINK]", "[/THINK]"
_CALL_TAGS = ("<tool_call>", "</tool_call>")
_HARMONY_TOKENS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.CALL, harmony.CONSTRAIN)
_KIMI_SECTION = (kimi_k2.SECTION,)


def _think(opened: bool = False, implicit_ends: tuple[str, ...] = ()) -> ReasoningFormat:
    return ReasoningFormat(
        lambda is_open: ThinkTagsParser(_THINK, _END_THINK, opened=is_open, implicit_ends=implicit_ends),
        special_tokens=(_THINK, _END_THINK, *implicit_ends),
        open_tag=_THINK,
        close_tag=_END_THINK,
        opened=opened,
    )


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(HermesParser, _CALL_TAGS, syntax=hermes.SYNTAX, starts=_CALL_TAGS[:1]),
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
    "gpt-oss": ReasoningFormat(lambda opened: HarmonyParser(), _HARMONY_TOKENS),
}

# The first whose texts are all in the template.
_TOOL_SIGNS = (
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(param",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
)
_REASONING_SIGNS = (
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", _THINK)),
    ("deepseek_r1", ("<｜Assistant｜>", _END_THINK)),
    ("mistral", (_MISTRAL_THINK,)),
    ("glm45", ("<arg_key>", _THINK)),
    ("qwen3", (_END_THINK,)),
)


def recognized_tools(template: str) -> str:
    """The tool format that a chat template asks for; empty where it is none of these."""
    return _recognized(template, _TOOL_SIGNS)


def recognized_reasoning(template: str) -> str:
    """The same for reasoning."""
    return _recognized(template, _REASONING_SIGNS)


def _recognized(template: str, signs: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return next((name for name, texts in signs if all(text in template for text in texts)), "")
