"""Recorded traffic as arrivals: Mooncake's JSON lines, and a plain CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.requests.text import Text, Texts
from baton.services.simulate.requests.workloads import Arrival

_MOONCAKE_BLOCK_TOKENS = 512
_COLUMNS = ("time", "input_length", "output_length")


def read_trace(path: Path, texts: Texts, speed: float = 1.0, max_requests: int = 0) -> list[Arrival]:
    """Reads the trace's arrivals from time 0 on, `speed` times as fast. 0 requests: all.

    `.jsonl` and `.json` are read in Mooncake's form: an object a line with `timestamp` (milliseconds), `input_length`,
    `output_length` and `hash_ids`, one for each 512 tokens of the prompt. Equal ids are equal content after equal
    prefixes. `.csv` needs the columns time (seconds), input_length and output_length. With a column prefix_id, prompts
    of one id begin with the same prefix_length tokens. Raises InvalidRequest naming the line.
    """
    if speed <= 0:
        raise InvalidRequest(f"speed is {speed:g}; it must be above 0", field="speed")
    rows = _csv_rows(path, texts) if path.suffix == ".csv" else _mooncake_rows(path, texts)
    arrivals: list[Arrival] = []
    for time, prompt, num_output in rows:
        arrivals.append(Arrival(time, prompt, num_output, 2 * num_output + 64, texts.new_content()))
        if len(arrivals) == max_requests:
            break
    if not arrivals:
        raise InvalidRequest(f"{path} has no requests", field="trace")
    start = min(arrival.time for arrival in arrivals)
    moved = [
        Arrival((one.time - start) / speed, one.prompt, one.num_output_tokens, one.max_tokens, one.output_content)
        for one in arrivals
    ]
    return sorted(moved, key=lambda arrival: arrival.time)


def _mooncake_rows(path: Path, texts: Texts) -> Iterator[tuple[float, Text, int]]:
    contents: dict[int, int] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            time, length, num_output = (
                float(row["timestamp"]) / 1000,
                int(row["input_length"]),
                int(row["output_length"]),
            )
            hash_ids = [int(one) for one in row["hash_ids"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _wrong(path, number, f"{type(error).__name__} {error}") from error
        num_wanted = -(-length // _MOONCAKE_BLOCK_TOKENS)
        if length < 1 or num_output < 1 or len(hash_ids) != num_wanted:
            raise _wrong(
                path,
                number,
                f"input_length {length} needs {num_wanted} hash_ids and has {len(hash_ids)}; lengths are at least 1",
            )
        text: Text | None = None
        for index, hash_id in enumerate(hash_ids):
            if hash_id not in contents:
                contents[hash_id] = texts.new_content()
            content = contents[hash_id]
            count = min(_MOONCAKE_BLOCK_TOKENS, length - index * _MOONCAKE_BLOCK_TOKENS)
            text = texts.extend(text, content, count) if text is not None else texts.start(content, count)
        assert text is not None, "a prompt has at least one block"
        yield time, text, num_output


def _csv_rows(path: Path, texts: Texts) -> Iterator[tuple[float, Text, int]]:
    prefixes: dict[tuple[str, int], Text] = {}
    reader = csv.DictReader(_lines(path))
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise _wrong(path, 1, f"no column {', '.join(missing)}; needed are {', '.join(_COLUMNS)}")
    for number, row in enumerate(reader, 2):
        try:
            time, length, num_output = float(row["time"]), int(row["input_length"]), int(row["output_length"])
            prefix_length = min(int(row.get("prefix_length") or 0), length)
        except (ValueError, TypeError) as error:
            raise _wrong(path, number, str(error)) from error
        if length < 1 or num_output < 1 or prefix_length < 0:
            raise _wrong(path, number, "lengths must be at least 1")
        name = row.get("prefix_id") or ""
        if not name or not prefix_length:
            yield time, texts.start(texts.new_content(), length), num_output
            continue
        key = (name, prefix_length)
        if key not in prefixes:
            prefixes[key] = texts.start(texts.new_content(), prefix_length)
        rest = length - prefix_length
        yield time, texts.extend(prefixes[key], texts.new_content(), rest) if rest else prefixes[key], num_output


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the trace {path} cannot be read: {error}", field="trace") from error


def _wrong(path: Path, number: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path}, line {number}: {what}", field="trace")
