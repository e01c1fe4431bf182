"""Messages of RDMA ends survive encoding, and other bytes are rejected."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.rpc.errors import Mismatch
from baton.worker.transfer.kinds.rdma.descriptors import (
    RemoteRegion,
    check_offer,
    decode_region,
    encode_offer,
    encode_region,
)
from baton.worker.transfer.kinds.rdma.nixl import Memory

REGION = RemoteRegion("agent", b"metadata", Memory(0x7F00_0000_1000, 4096, on_device=True, device=3))
BLOB = encode_region(REGION)


@given(
    st.text(min_size=1, max_size=32),
    st.binary(min_size=1, max_size=1000),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_regions_survive_the_way(agent, metadata, address, num_bytes, on_device, device):
    region = RemoteRegion(agent, metadata, Memory(address, num_bytes, on_device, device))
    assert decode_region(encode_region(region), num_bytes) == region


@given(st.data())
def test_no_changed_blob_is_taken(data):
    changed = bytearray(BLOB)
    at = data.draw(st.integers(0, len(BLOB) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Mismatch):
        decode_region(bytes(changed), 4096)


@given(st.one_of(st.binary(max_size=200), st.integers(0, len(BLOB) - 1).map(lambda n: BLOB[:n]), st.just(BLOB + b"x")))
def test_only_whole_blobs_are_taken(blob):
    with pytest.raises(Mismatch):
        decode_region(blob, 4096)


def test_the_region_has_the_size_of_the_slots():
    with pytest.raises(Mismatch, match="4096 bytes of memory, expected 8192"):
        decode_region(BLOB, 8192)


@pytest.mark.parametrize("wrong", [{"agent": "x" * 129}, {"agent": ""}, {"metadata": b""}])
def test_names_and_metadata_have_bounds(wrong):
    with pytest.raises(Mismatch, match="name an agent of"):
        decode_region(encode_region(dataclasses.replace(REGION, **wrong)), 4096)


def test_offers_are_of_one_version():
    check_offer(encode_offer())
    with pytest.raises(Mismatch, match="version 2 of the rdma transport, this worker has 1"):
        check_offer(b"BRDM\x02\x00")
    with pytest.raises(Mismatch, match="expected b'BRDM'"):
        check_offer(b"BIPC\x01\x00")
    with pytest.raises(Mismatch, match="has 0 bytes, expected 6"):
        check_offer(b"")
