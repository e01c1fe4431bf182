import itertools
import socket
from dataclasses import replace

import pytest
from support.processes import ports

from baton.gateway.config import GatewayConfig
from baton.services.machine.devices import Devices
from baton.services.settings import SettingsError
from baton.services.up import tandem
from baton.services.up.command import batch_folder
from baton.services.up.config import UpConfig
from baton.services.up.layout import choose_layout


def plan(forwarded=None, **settings):
    counter = itertools.count(20001)
    config = UpConfig(**settings)
    layout = choose_layout(config.executor, config.counts, Devices())

    def choose(count):
        return [next(counter) for _ in range(count)]

    return tandem.plan(config, layout, "/models/story", 8, choose, forwarded or {})


def flag(service, name):
    return service.flags[service.flags.index(name) + 1]


def by_name(plans):
    return {one.name: one for one in plans}


def test_a_tandem_is_five_services():
    assert [one.name for one in plan()] == ["gateway", "router", "worker prefill-0", "worker decode-0", "kvstore"]


def test_services_get_each_others_addresses():
    services = by_name(plan(decode_workers=2))
    workers = [services[name] for name in ("worker prefill-0", "worker decode-0", "worker decode-1")]
    assert flag(services["gateway"], "--router") == services["router"].address
    assert flag(services["router"], "--workers") == ",".join(worker.address for worker in workers)
    assert {flag(one, "--kvstore") for one in (*workers, services["router"])} == {services["kvstore"].address}


def test_no_two_services_share_an_address():
    plans = plan(prefill_workers=3, decode_workers=3)
    addresses = [address for one in plans if one.command != "gateway" for address in (one.address, one.metrics)]
    assert len(set(addresses)) == len(addresses) == 2 * 8


def test_without_prefill_workers_the_others_do_both():
    services = by_name(plan(prefill_workers=0))
    assert flag(services["worker both-0"], "--role") == "both"


def test_the_models_default_name_is_its_folders():
    assert {flag(one, "--served-model-name") for one in plan() if "--model" in one.flags} == {"story"}
    assert flag(plan(served_model_name=("tales",))[0], "--served-model-name") == "tales"


def test_workers_have_a_models_first_name_and_the_gateway_all():
    for one in plan(served_model_name=("tales", "gpt-5")):
        if "--model" in one.flags:
            assert flag(one, "--served-model-name") == ("tales,gpt-5" if one.name == "gateway" else "tales")


@pytest.mark.parametrize(
    ("config", "threads"),
    [({}, "4"), ({"decode_workers": 2}, "2"), ({"decode_workers": 20}, "1"), ({"threads": 6}, "6")],
)
def test_workers_share_the_cores_by_default(config, threads):
    assert {flag(one, "--threads") for one in plan(**config) if one.command == "worker"} == {threads}


def test_every_service_logs_in_the_chosen_form():
    assert {flag(one, "--log-format") for one in plan(log_format="json")} == {"json"}


def test_forwarded_flags_reach_every_process_of_their_service_and_no_other():
    forwarded = {"gateway": ("--strict-fields=true",), "worker": ("--num-blocks=9", "--block-size=8")}
    for one in plan(forwarded, decode_workers=2):
        for command, flags in forwarded.items():
            assert all(flag in one.flags for flag in flags) == (one.command == command), one.name


def test_the_edge_stops_first_and_the_index_last():
    stages = {one.name: one.stop_stage for one in plan()}
    assert stages["gateway"] < stages["router"] < stages["worker decode-0"] == stages["worker prefill-0"]
    assert stages["worker decode-0"] < stages["kvstore"]


def test_port_0_becomes_a_real_port_and_others_stay():
    config = tandem.check_listen_addresses(
        UpConfig(rest_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0"), ports.free_ports
    )
    assert config.rest_listen != config.grpc_listen
    assert tandem.check_listen_addresses(config, ports.free_ports) == config


def test_an_address_that_cannot_be_listened_on_is_refused_with_its_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingsError, match=rf"--grpc-listen {address}: the port is in use"):
            tandem.check_listen_addresses(UpConfig(rest_listen="127.0.0.1:0", grpc_listen=address), ports.free_ports)


def test_one_address_for_both_apis_is_refused():
    config = tandem.check_listen_addresses(
        UpConfig(rest_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0"), ports.free_ports
    )
    with pytest.raises(SettingsError, match="give two addresses"):
        tandem.check_listen_addresses(replace(config, grpc_listen=config.rest_listen), ports.free_ports)


def test_several_gateway_processes_are_one_service():
    gateway = plan(gateway_processes=3)[0]
    assert flag(gateway, "--processes") == "3"
    assert "--processes" not in plan()[0].flags
    assert plan(gateway_processes=3, redis_url="redis://r")[0].secrets == {"BATON_GATEWAY_REDIS_URL": "redis://r"}


@pytest.mark.parametrize(
    ("fields", "variables", "has_folder"),
    [
        ({}, {}, True),
        ({"gateway_processes": 2}, {}, False),  # they would not share it
        ({"gateway_processes": 2, "redis_url": "redis://r"}, {}, True),
        ({"gateway_processes": 2}, {"BATON_GATEWAY_REDIS_URL": "redis://r"}, True),
    ],
)
def test_files_and_batches_have_a_folder_where_all_gateway_processes_share_them(fields, variables, has_folder):
    with batch_folder(UpConfig(**fields), variables) as given:
        GatewayConfig(
            processes=fields.get("gateway_processes", 1),
            batch_store=given.get("BATON_GATEWAY_BATCH_STORE", ""),
            redis_url=fields.get("redis_url", given.get("BATON_GATEWAY_REDIS_URL", "")),
        ).validate()
        assert ("BATON_GATEWAY_BATCH_STORE" in given) is has_folder
