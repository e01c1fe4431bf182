"""Measures how cache salts reduce a tenant's own hits: a simulated fleet with and without them, on the same requests.

baton bench salts [--seeds 1 2 3 4 5]

Three tenants send chats with different texts to three workers. A hit is a prompt token that a worker has cached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "security"))

from test_tenant_blocks import hit_rate

from baton.services.bench.report import facts_line, machine_facts, render_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    rows, changes = [], []
    for seed in parser.parse_args().seeds:
        salted, plain = hit_rate(True, seed), hit_rate(False, seed)
        changes.append((salted / plain - 1) * 100)
        rows.append([str(seed), f"{plain * 100:.2f} %", f"{salted * 100:.2f} %", f"{changes[-1]:+.2f} %"])
    rows.append(["mean", "", "", f"{statistics.mean(changes):+.2f} %"])
    print(facts_line(machine_facts(())))
    print(render_table(["seed", "hit rate without salts", "with", "change"], rows))


if __name__ == "__main__":
    main()
