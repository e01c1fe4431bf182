"""What architectures' names say of a model's purpose."""

from __future__ import annotations

import enum
import re

from baton.worker.models.fields import Fields


class Purpose(enum.Enum):
    """What a checkpoint was trained for."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"
    TOKEN_EMBED = "token_embed"
    REWARD = "reward"
    STEP_REWARD = "step_reward"  # a reward at each token that ends a step

    @property
    def classifies(self) -> bool:
        return self in (Purpose.CLASSIFY, Purpose.TOKEN_CLASSIFY) or self.rewards

    @property
    def rewards(self) -> bool:
        return self in (Purpose.REWARD, Purpose.STEP_REWARD)


_COLBERT = "HF_ColBERT"
_ENDINGS = {
    _COLBERT: Purpose.TOKEN_EMBED,
    "ForRewardModel": Purpose.REWARD,
    "ForProcessRewardModel": Purpose.STEP_REWARD,
    "ForSequenceClassification": Purpose.CLASSIFY,
    "ForTokenClassification": Purpose.TOKEN_CLASSIFY,
    "ForMaskedLM": Purpose.EMBED,
    "Model": Purpose.EMBED,
}
_OTHER_ENDINGS = re.compile(r"(LMHeadModel|For[A-Z]\w+)$")


def purpose_of(fields: Fields) -> Purpose:
    """Returns the purpose that the architecture's name states."""
    name = _architecture(fields)
    if name.endswith("LMHeadModel"):
        return Purpose.GENERATE
    return next((purpose for ending, purpose in _ENDINGS.items() if name.endswith(ending)), Purpose.GENERATE)


def base_name(architecture: str) -> str:
    """Returns the name without what it states about the purpose: Qwen3 of Qwen3Model."""
    if architecture == _COLBERT:
        return "Bert"
    base = _OTHER_ENDINGS.sub("", architecture)
    return base.removesuffix("Model")


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
