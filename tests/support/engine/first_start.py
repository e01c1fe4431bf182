"""A program that starts a CUDA executor and prints as JSON what its process compiled by itself.

python -m support.engine.first_start MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton import knobs
from triton.runtime import build

from baton.worker.config import WorkerConfig
from baton.worker.executors.factory import make_executor


def main(model: str) -> None:
    """Prints the kernels that were found compiled, those that were not, and the C modules built."""
    found: list[str] = []
    compiled: list[str] = []
    built: list[str] = []
    run = build._build

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        (found if cache_hit else compiled).append(src.name)

    def count(name: str, *args: Any) -> str:
        built.append(name)
        return run(name, *args)

    knobs.compilation.listener = listen
    build._build = count
    config = WorkerConfig(executor="cuda", model=model, num_blocks=64, max_num_requests=64)
    make_executor(config).close()
    print(json.dumps({"found": found, "compiled": compiled, "built": built}))


if __name__ == "__main__":
    main(sys.argv[1])
