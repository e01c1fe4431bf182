"""How often garbage in cycles is looked for."""

import gc

from baton.router.garbage import rare_collections


def test_a_router_looks_for_garbage_only_when_much_has_come():
    before = gc.get_threshold()
    looks = []
    kept = []

    def heard(phase, _):
        looks.append(phase)

    with rare_collections():
        gc.callbacks.append(heard)
        try:
            kept += [[] for _ in range(30_000)]
            assert not looks
            kept += [[] for _ in range(30_000)]
            assert looks
        finally:
            gc.callbacks.remove(heard)
    assert gc.get_threshold() == before
