"""Paths in this process, and peers in others."""

from __future__ import annotations

import pytest
from support.processes.child import Child
from support.transfer.rdma_checks import resume
from support.transfer.rdma_peer import Pool, RdmaReceiver, make_path


@pytest.fixture(scope="module")
def pool():
    return Pool(seed=1)


@pytest.fixture
def make_peer():
    peers = []

    def make(**settings):
        peers.append(Child(RdmaReceiver, **settings))
        return peers[-1]

    yield make
    for peer in peers:
        peer.kill()


@pytest.fixture(scope="module")
def steady_peer():
    """One that no test harms."""
    peer = Child(RdmaReceiver, max_peers=256)
    yield peer
    peer.kill()


@pytest.fixture(scope="module")
def _stoppable_peer():
    peer = Child(RdmaReceiver, max_peers=256)
    yield peer
    peer.kill()


@pytest.fixture
def stoppable_peer(_stoppable_peer):
    """One that runs again after the test."""
    yield _stoppable_peer
    resume(_stoppable_peer)


@pytest.fixture
def open_path(pool):
    paths = []

    def make(of=pool, **settings):
        paths.append(make_path(of, **settings))
        return paths[-1]

    yield make
    for path in paths:
        path.close()


@pytest.fixture
def path(open_path):
    return open_path()


@pytest.fixture
def connect(path):
    senders = []

    def make(peer, by=path):
        senders.append(by.connect(peer.call("accept", by.offer())))
        return senders[-1]

    yield make
    for sender in senders:
        sender.close()
