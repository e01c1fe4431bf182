"""Prints the table of a step trace (`--trace-steps`): python tests/bench/engine/trace_summary.py PATH."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[3] / name) for name in ("proto", "worker", "kernels"))

from baton.worker.process.step_trace import summary


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with Path(argv[0]).open(encoding="utf-8") as lines:
        print("\n".join(summary(json.loads(line) for line in lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
