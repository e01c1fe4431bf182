"""The built-in formats of reasoning by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton.gateway.parsing.output_format import ReasoningFormat
from baton.gateway.parsing.reasoning_formats import granite as granite_reasoning
from baton.gateway.parsing.reasoning_formats import kimi_k3, minimax_m3
from baton.gateway.parsing.reasoning_formats.answer_tags import AnswerTagsParser
from baton.gateway.parsing.reasoning_formats.granite import GraniteReasoningParser
from baton.gateway.parsing.reasoning_formats.kept_reasoning import KeptReasoningParser
from baton.gateway.parsing.reasoning_formats.kimi_k3 import KimiK3ReasoningParser
from baton.gateway.parsing.reasoning_formats.minimax_m3 import MiniMaxM3ReasoningParser
from baton.gateway.parsing.reasoning_formats.think_tags import ThinkTagsParser
from baton.gateway.parsing.tool_formats import harmony, inkling, kimi_k2, solar_open2
from baton.gateway.parsing.tool_formats.gemma import Gemma4Parser
from baton.gateway.parsing.tool_formats.harmony import HarmonyParser
from baton.gateway.parsing.tool_formats.inkling import InklingParser

_THINK, _END_THINK = "<think>", "</think>"
_MISTRAL_THINK, _MISTRAL_END_THINK = "[THINK]", "[/THINK]"
_SEED_THINK = ("<seed:think>", "</seed:think>")
_GEMMA_THINK = ("<|channel>thought\n", "<channel|>")
_COHERE_THINK = ("<|START_THINKING|>", "<|END_THINKING|>")
_COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_COHERE_TEXT = ("<|START_TEXT|>", "<|END_TEXT|>")
_SOLAR_THINK = ("<|think:start|>", "<|think:end|>")
_HARMONY_REASONING = ReasoningFormat(lambda opened: HarmonyParser(), harmony.TOKENS, answer_mark=harmony.ANSWER)


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


def _answered(
    opened: bool, answer_tags: tuple[str, str], tags: tuple[str, str] = (_THINK, _END_THINK)
) -> ReasoningFormat:
    """Returns the format of reasoning tags before an answer that may have tags of its own."""
    return replace(
        _think(opened, tags=tags), new_parser=lambda is_open: AnswerTagsParser(*tags, answer_tags, opened=is_open)
    )


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": _think(opened=True),
    "qwen3": _think(),
    "glm45": _think(),
    "kimi_k2": _think(implicit_ends=(kimi_k2.SECTION,)),
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
    "cohere_command4": replace(
        _answered(False, _COHERE_TEXT, _COHERE_THINK), special_tokens=(*_COHERE_THINK, *_COHERE_TEXT)
    ),
    "solar_open2": _think(opened=True, implicit_ends=solar_open2.TAGS[:1], tags=_SOLAR_THINK),
    "minimax_m3": ReasoningFormat(
        MiniMaxM3ReasoningParser, minimax_m3.THINK, open_tag=minimax_m3.THINK[0], close_tag=minimax_m3.THINK[1]
    ),
    "kimi_k3": ReasoningFormat(
        KimiK3ReasoningParser, kimi_k3.TOKENS, open_tag=kimi_k3.THINK[0], close_tag=kimi_k3.THINK[1]
    ),
    "inkling": ReasoningFormat(
        lambda opened: InklingParser(opened=opened),
        inkling.TOKENS,
        open_tag=inkling.THINKING,
        answer_mark=inkling.TEXT,
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
