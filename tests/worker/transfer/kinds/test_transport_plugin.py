"""Transports of plugins: both ends need them, they cannot break a worker, and the example moves KV."""

from __future__ import annotations

import os

import pytest
from support.plugins.packages import EXAMPLES, install, install_example
from support.transfer.transport_ends import (
    SLOT_BYTES,
    SOURCE,
    TARGET,
    Ends,
    HostKv,
    dialled,
    ended,
    filled,
    hand_over,
    key_of,
    kv_tls,
    wait_until,
)

from baton.plugins.kinds import TRANSPORTS
from baton.plugins.plugins import PluginError, Plugins
from baton.rpc.errors import DataLoss, InvalidRequest, Unsupported
from baton.v1 import kv_pb2
from baton.worker.config import WorkerConfig
from baton.worker.transfer.base import Landed, Pushed, PushFailed
from baton.worker.transfer.kinds.factory import choose_paths
from baton.worker.transfer.kinds.registry import OWN_KINDS
from baton.worker.transfer.routes import address_of, routes_to
from baton.worker.transfer.wire.frames import GREETING_BYTES, Greeting, Open, decode_open, encode_greeting, encode_open
from baton.worker.transfer.wire.greetings import receive_welcome
from baton.worker.transport_kinds import NAMES, name_of, parse_order, wire_of

NAME = "shared-folder"


@pytest.fixture
def many():
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "transports"))
    import baton_shared_folder

    return baton_shared_folder


@pytest.fixture
def packages(tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def end(many, module, folder, executor=None, **values):
    """An end with the example's transport in this folder, and tcp."""
    folder.mkdir(exist_ok=True)
    executor = executor or HostKv()
    path = module.SharedFolderPath(executor, SLOT_BYTES, folder)
    return many.make(executor, paths={NAME: path, "tcp": None}, **values)


def slots_in(folder):
    return list(folder.glob("slots-*"))


@pytest.mark.parametrize("secured", [False, True])
def test_the_example_moves_blocks(many, module, tmp_path, secured):
    values = {"tls": kv_tls()} if secured else {}
    sender = end(many, module, tmp_path / "shared", filled(HostKv()), **values)
    receiver = end(many, module, tmp_path / "shared", **values)
    for number in (1, 2):
        hand_over(sender, receiver, number=number)
        assert receiver.wait_for(Landed).num_bytes == sender.wait_for(Pushed).num_bytes
    assert receiver.read(TARGET) == sender.read(SOURCE)
    totals = receiver.transport.totals_by_kind()
    assert (totals[NAME].num_received_pieces, totals["tcp"].num_received_pieces) == (8, 0)
    assert len(slots_in(tmp_path / "shared")) == 1
    receiver.transport.close()
    assert slots_in(tmp_path / "shared") == []


def test_ends_without_a_common_folder_use_the_next_kind(many, module, tmp_path):
    sender = end(many, module, tmp_path / "one", filled(HostKv()))
    receiver = end(many, module, tmp_path / "two")
    hand_over(sender, receiver)
    receiver.wait_for(Landed)
    assert receiver.read(TARGET) == sender.read(SOURCE)
    assert receiver.transport.totals_by_kind()["tcp"].num_received_pieces == 4
    assert sender.transport.totals_by_kind()[NAME].num_fallbacks == 1


@pytest.mark.parametrize("method", ["put", "write", "accept", "connect"])
def test_a_transport_that_raises_harms_its_push_alone(many, module, tmp_path, monkeypatch, method):
    owner = {"put": "Sender", "write": "Receiver"}.get(method, "Path")
    sender = end(many, module, tmp_path / "shared", filled(HostKv()))
    receiver = end(many, module, tmp_path / "shared")

    def fail(*_):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(module, f"SharedFolder{owner}"), method, fail)
        hand_over(sender, receiver)
        if method == "put":
            assert "broken" in sender.wait_for(PushFailed).reason
        elif method == "write":
            sender.wait_for(Pushed)
        else:
            receiver.wait_for(Landed)  # over tcp
    sender.transport.forget(1)
    receiver.transport.fence_inbound(1)
    hand_over(sender, receiver, number=2)
    while receiver.wait_for(Landed).transfer_id != 2:
        pass
    assert receiver.read(TARGET) == sender.read(SOURCE)


def test_files_of_killed_workers_are_removed(module, tmp_path):
    path = module.SharedFolderPath(HostKv(), SLOT_BYTES, tmp_path)
    receiver = path.accept(path.offer())
    (tmp_path / "slots-0123").write_bytes(b"of a worker that was killed")
    module.SharedFolderPath(HostKv(), SLOT_BYTES, tmp_path)
    assert [each.name for each in slots_in(tmp_path)] == [receiver.slots.blob.decode()]
    receiver.close(True)
    receiver.close(True)
    with pytest.raises(Unsupported, match="cannot be used"):
        module.SharedFolderPath(HostKv(), SLOT_BYTES, tmp_path / "missing")


def test_a_truncated_file_is_lost_data(module, tmp_path):
    path = module.SharedFolderPath(HostKv(), SLOT_BYTES, tmp_path)
    receiver = path.accept(path.offer())
    os.truncate(tmp_path / receiver.slots.blob.decode(), 100)
    with pytest.raises(DataLoss, match="has 100 of 128 bytes of slot 0"):
        receiver.checksum(0, 128)
    receiver.close(True)


# Names.


def test_a_plugin_is_named_where_own_kinds_have_numbers():
    assert wire_of(NAME) == (kv_pb2.TRANSPORT_KIND_PLUGIN, NAME)
    assert [name_of(*wire_of(name)) for name in (*NAMES, NAME)] == [*NAMES, NAME]
    assert name_of(kv_pb2.TRANSPORT_KIND_PLUGIN) == "5"
    assert list(OWN_KINDS) == list(NAMES)
    addresses = [address_of(name, 0, "h", 5, "boot.1") for name in ("tcp", NAME, "other")]
    assert [route.name for route in routes_to(addresses, (NAME, "tcp"), "")] == [NAME, "tcp"]


def test_a_plugins_name_travels_with_its_connection():
    opened = Open(kv_pb2.TRANSPORT_KIND_PLUGIN, 1, 7, b"\x00offer", bytes(range(16)), "Übertragung")
    assert decode_open(encode_open(opened)[GREETING_BYTES:]) == opened


@pytest.mark.parametrize("rest", [b"", b"\x00offer", b"\x09short", b"\x02\xff\xfe", b"\x02a\n"])
def test_a_connection_that_names_no_plugin_is_cut(many, rest):
    body = encode_open(Open(kv_pb2.TRANSPORT_KIND_TCP, 0, 3, b""))[GREETING_BYTES:]
    body = body[:16] + kv_pb2.TRANSPORT_KIND_PLUGIN.to_bytes(2, "little") + body[18:] + rest
    with pytest.raises(DataLoss, match="does not name it"):
        decode_open(body)
    receiver = many.make(HostKv(), "tcp")
    with dialled(receiver) as sock:
        sock.sendall(encode_greeting(Greeting.OPEN, body))
        assert ended(sock)
    wait_until(lambda: receiver.transport.totals().num_bad_connections == 1)


def test_an_unknown_plugin_is_refused_by_its_name(many):
    receiver = many.make(HostKv(), "tcp")
    with dialled(receiver) as sock:
        sock.sendall(encode_open(Open(kv_pb2.TRANSPORT_KIND_PLUGIN, 0, 3, b"", key_of(receiver), "absent")))
        with pytest.raises(Unsupported, match="KV over absent is not received here, only over tcp"):
            receive_welcome(sock)


# The choice.


def test_plugins_come_first_and_need_no_name_in_the_order(packages, tmp_path, monkeypatch):
    name = install_example(packages, "transports")
    plugins = Plugins.named((name,), "worker")
    monkeypatch.delenv("BATON_SHARED_FOLDER", raising=False)
    chosen = choose_paths("auto", HostKv(), SLOT_BYTES, None, plugins=plugins)
    assert (list(chosen.used), chosen.left_out[NAME]) == (["ipc", "tcp"], "BATON_SHARED_FOLDER is not set")
    with pytest.raises(Unsupported, match=f"transports={NAME}: {NAME} cannot be used: BATON_SHARED_FOLDER is not set"):
        choose_paths(NAME, HostKv(), SLOT_BYTES, None, plugins=plugins)
    monkeypatch.setenv("BATON_SHARED_FOLDER", str(tmp_path))
    assert list(choose_paths("auto", HostKv(), SLOT_BYTES, None, True, plugins).used) == [NAME, "ipc", "tcp"]
    assert list(choose_paths(f"tcp,{NAME}", HostKv(), SLOT_BYTES, None, False, plugins).used) == ["tcp", NAME]
    assert parse_order("auto", (NAME,)) == (NAME, *NAMES)
    WorkerConfig(transports=f"{NAME},tcp", plugins=(NAME,)).validate()
    with pytest.raises(InvalidRequest, match=f"'{NAME}' is unknown; it must be auto, none, or some of ipc"):
        WorkerConfig(transports=f"{NAME},tcp").validate()


_PLAIN = """
from baton.worker.transfer.transport_kind import TransportKind
def make(executor, slot_bytes, kv):
    raise OSError("no licence")
A = TransportKind(make)
B = make
"""


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("plain", "A", r"'plain' cannot be started \(entry point .*: OSError: no licence"),
        ("plain", "B", "TypeError: it is a function; it must be a TransportKind"),
        ("tcp", "A", "'tcp' is the name of one of Baton's own transports"),
        ("auto", "A", "'auto' cannot be the name of a transport"),
        ("x" * 256, "A", "at most 255 bytes"),
    ],
)
def test_a_wrong_plugin_is_refused_by_name(packages, name, value, problem):
    install(packages, "wire-kinds", _PLAIN, {TRANSPORTS.group: {name: value}})
    with pytest.raises(PluginError, match=problem):
        choose_paths("auto", HostKv(), SLOT_BYTES, None, plugins=Plugins.named((name,), "worker"))


def test_a_plugin_that_encrypts_nothing_is_off_under_tls(packages):
    install(packages, "wire-kinds", _PLAIN, {TRANSPORTS.group: {"plain": "A"}})
    chosen = choose_paths("auto", HostKv(), SLOT_BYTES, None, True, Plugins.named(("plain",), "worker"))
    assert list(chosen.used) == ["ipc", "tcp"]
    assert "plain encrypts nothing" in chosen.left_out["plain"]
