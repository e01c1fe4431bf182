"""Replicas of routers and of kvstores, as processes, follow each other over mTLS."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

from support.network.tls_rig import make_certs, metrics_over_tls
from support.processes import ports
from support.processes.stack import Service, metric, wait_until

from baton.services.certs.command import tls_flags
from baton.services.up.config import UpConfig
from baton.services.up.tandem import Probe, ServicePlan, TlsPlan, plan_tls

READY_SECONDS = 60


def planned(command, number, listen, metrics, flags):
    common = ("--listen", listen, "--metrics-listen", metrics)
    return ServicePlan(
        f"{command}-{number}", command, (*common, *flags), {}, listen, metrics, Probe.GRPC_HEALTH, listen, 1
    )


@contextmanager
def replicas(folder, command, flags, tls: TlsPlan):
    """Two of a service; `flags` of its addresses."""
    addresses = [f"127.0.0.1:{port}" for port in ports.free_ports(4)]
    with ExitStack() as cleanup:
        services = []
        for number in range(2):
            listen, metrics = addresses[number], addresses[2 + number]
            plan = planned(command, number, listen, metrics, flags(addresses[:2]))
            service = Service(plan, folder / f"{plan.name}.log", tls=tls)
            cleanup.callback(service.stop_by_force)
            service.spawn()
            services.append(service)
        for service in services:
            service.wait_ready()
        yield services


def value_of(service, folder, name):
    return metric(metrics_over_tls(service.plan.metrics, folder, service.plan.command), name)


def test_routers_connect_to_each_other(tmp_path):
    folder = make_certs(tmp_path / "certs")
    nobody = f"127.0.0.1:{ports.free_ports(1)[0]}"

    def flags(addresses):
        return ("--peers", ",".join(addresses), "--workers", nobody, *tls_flags(str(folder), "router"))

    with replicas(tmp_path, "router", flags, plan_tls(UpConfig(tls_dir=str(folder)))) as routers:
        for router in routers:
            wait_until(
                lambda router=router: value_of(router, folder, "baton_router_peers") == 1,
                "it hears the other",
                READY_SECONDS,
            )


def test_kvstores_connect_to_each_other(tmp_path, redis_server):
    folder = make_certs(tmp_path / "certs")

    def flags(addresses):
        return ("--redis-url", redis_server.url, *tls_flags(str(folder), "kvstore"))

    with replicas(tmp_path, "kvstore", flags, plan_tls(UpConfig(tls_dir=str(folder)))) as kvstores:
        for kvstore in kvstores:
            wait_until(
                lambda kvstore=kvstore: value_of(kvstore, folder, "baton_kvstore_replicas") == 1,
                "it hears the other",
                READY_SECONDS,
            )
