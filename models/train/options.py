"""The training's command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from train.stories.corpus import AS_TRAINED

_SHORTEST = 2048
_BLOCK = 128  # of a block mask


def parse(arguments: list[str] | None, description: str | None) -> argparse.Namespace:
    """Returns the options, or ends the program with a message that names the wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m train", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--before", type=_model, required=True, help="folder of the earlier model, which teaches stories")
    add("--start", type=_model, required=True, help="folder of the model that is trained further")
    add("--out", type=Path, required=True, help="folder for model.safetensors and report.json")
    add("--minutes", type=_positive(float), default=7.5, help="for everything together, from the start on")
    add("--stories", type=_positive(int), default=24_000, help="documents that the earlier model writes")
    add("--chats", type=_positive(int), default=90_000, help="short conversations")
    add("--agents", type=_positive(int), default=2_000, help="agents' conversations")
    add("--held-out", type=_positive(int), default=1_000, help="documents of each part of the held-out stories")
    add(
        "--exam",
        type=_positive(int),
        default=400,
        help="chats of each skill that the figures are of; half choose",
    )
    add("--length", type=_length, default=65_536, help="tokens of a row")
    add("--peak", type=_positive(float), default=8e-4, help="learning rate")
    add("--story-rows", type=_positive(int), default=2, help="rows of stories in a step, beside one of skills")
    add("--story-weight", type=_positive(float), default=5.0, help="of the stories' loss beside the skills'")
    add(
        "--teacher-temperature",
        type=_positive(float),
        default=AS_TRAINED.temperature,
        help="of the earlier model's next-token distribution; the default is what its stories are sampled at",
    )
    add("--steps", type=_positive(int), default=1_000_000, help="at most")
    return parser.parse_args(arguments)


def _length(text: str) -> int:
    length = int(text)
    if length < _SHORTEST or length % _BLOCK:
        raise argparse.ArgumentTypeError(f"{length} tokens; allowed are multiples of {_BLOCK} from {_SHORTEST} on")
    return length


def _model(text: str) -> Path:
    folder = Path(text)
    missing = [name for name in ("config.json", "tokenizer.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise argparse.ArgumentTypeError(f"{text} lacks {', '.join(missing)}")
    return folder


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = kind(text)
        if number <= 0:
            raise argparse.ArgumentTypeError(f"{text}; it must be above 0")
        return number

    return read
