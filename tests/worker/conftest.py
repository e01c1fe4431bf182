"""Workers without processes, for tests of their messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.transfer.handover_harness import Network, Node, make_node


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    for node in made.nodes.values():
        node.handover.close()


@pytest.fixture
def pair(network: Network) -> tuple[Node, Node]:
    """A prefill worker and a decode worker."""
    return make_node(network, "prefill"), make_node(network, "decode")
