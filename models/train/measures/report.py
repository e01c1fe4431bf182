"""The figures of one network, and those of several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer
from train.chats.chat import Tokens
from train.measures.evaluation import behaviour, perplexities
from train.measures.exam import Exam
from train.networks.network import Network

# A network reads text best that is as sharp as itself. The best of these measures its reading apart from that.
_TEMPERATURES = tuple(step / 20 for step in range(22, 9, -1))


class Reporter:
    """Measures networks on documents that are not used to choose between them."""

    def __init__(self, exam: Exam, held_out: Mapping[str, Sequence[Tokens]], tokenizer: Tokenizer) -> None:
        self._exam, self._held_out, self._tokenizer = exam, held_out, tokenizer

    def figures(self, network: Network) -> dict[str, float]:
        """Returns perplexities, behaviour and shares of right answers by name."""
        made: dict[str, float] = {}
        for name, documents in self._held_out.items():
            found = perplexities(network, documents, self._exam.length, _TEMPERATURES)
            best = min(found, key=lambda temperature: found[temperature])
            made[f"perplexity, {name}"] = found[1.0]
            made[f"perplexity, {name}, at the best temperature"] = found[best]
            made[f"the best temperature, {name}"] = best
        made |= behaviour(network, self._tokenizer)
        return made | {name: score.share for name, score in self._exam.marks(network).skills.items()}


def table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a Markdown table of a column a network."""
    names = list(next(iter(columns.values())))
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| {name} | {' | '.join(f'{column[name]:.3f}' for column in columns.values())} |" for name in names]
    return "\n".join(lines)
