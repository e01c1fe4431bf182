"""A process that describes a model folder as JSON, for those that do not load what may compute it.

`python -m baton.worker.models.supported.process FOLDER IMPLEMENTATION MAX_MODEL_LEN` prints a ModelDescription, or a
`refusal`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from baton.rpc.errors import ServiceError
from baton.worker.models.registry import load_config
from baton.worker.models.supported.description import describe


def main(argv: list[str]) -> int:
    """Prints one line."""
    folder, implementation, max_model_len = argv
    try:
        config = load_config(Path(folder), implementation).at_length(int(max_model_len))
    except ServiceError as error:
        print(json.dumps({"refusal": error.message}))
        return 0
    print(json.dumps(asdict(describe(config))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
