"""When garbage in cycles is looked for."""

import gc
import weakref

import pytest

from baton.router.garbage import CallGarbage, rare_collections


@pytest.fixture
def looks():
    """The generations that were looked at, one for each look."""
    heard = []

    def hear(phase, info):
        if phase == "start":
            heard.append(info["generation"])

    gc.callbacks.append(hear)
    yield heard
    gc.callbacks.remove(hear)


def test_containers_that_come_from_anywhere_are_looked_at_seldom(looks):
    before = gc.get_threshold()
    kept = []
    with rare_collections():
        looks.clear()
        kept += [[] for _ in range(9_000)]
        assert not looks
        kept += [[] for _ in range(200_000)]
        assert 15 <= len(looks) <= 21
        assert set(looks) == {0}
    assert gc.get_threshold() == before


def test_garbage_of_calls_is_collected_in_small_parts(looks):
    class Node:
        pass

    with rare_collections():
        looks.clear()
        garbage = CallGarbage()
        left = []
        for _ in range(640):
            node = Node()
            node.itself = node
            left.append(weakref.ref(node))
            del node
            garbage.called()
        assert looks == [0] * 10
        gc.collect(0)
        assert not any(one() for one in left)
