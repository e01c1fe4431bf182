"""The doctor's checks: their findings for a good machine, and for bad ones."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace

import pytest

from baton.rpc.tls.files import TlsFiles
from baton.services import cli, extras
from baton.services.certs.command import main as make_certs
from baton.services.certs.command import tls_flags
from baton.services.doctor.finding import Level
from baton.services.doctor.machine import clocks, fabric, gpus, limits, versions
from baton.services.doctor.service import certificates, kubernetes, listening, model, peers, redis_server, weight_files
from baton.services.doctor.targets import Address, Targets, targets_of
from baton.services.machine import gpus as machine_gpus

WORKER = Targets(service="worker", executor="cuda", model="m", needs_weights=True)
GIB = 1 << 30
LIMITS = limits.LimitFacts(None, None, None, 8 * GIB, 64 * GIB, None, 8)
GPU_LINE = "0, NVIDIA H100 80GB HBM3, 570.86.15, 81559, 81000, 9.0, 0, Not Active, 35"


def levels(findings):
    return [one.level for one in findings]


def worst(findings):
    order = [Level.OK, Level.UNKNOWN, Level.WARNING, Level.FAILED]
    return max(findings, key=lambda one: order.index(one.level))


def test_every_bad_finding_has_a_fix():
    bad = [
        *limits.check_limits(replace(LIMITS, open_files=256, shared_memory=64 << 20, locked_memory=1 << 16), WORKER),
        *limits.check_limits(replace(LIMITS, container_memory=GIB), replace(WORKER, host_cache_bytes=2 * GIB)),
        *gpus.check_gpus(machine_gpus.GpuFacts(problem="nvidia-smi is not installed"), WORKER),
        *fabric.check_fabric(_fabric(), replace(WORKER, transports=("nccl", "rdma"))),
        *clocks.check_clock(clocks.ClockFacts(False, redis_offset=-30.0)),
        *peers.check_peers((peers.PeerFacts(Address("--router", "r:1", "router"), False, "refused"),), WORKER),
        *model.check_model(model.ModelFacts("m"), WORKER, model.Capacity()),
        *redis_server.check_redis(redis_server.RedisFacts("redis://r", "no answer"), Targets("gateway")),
        *kubernetes.check_watches((kubernetes.WatchFacts("k8s://ns/workers:8100", 403, "forbidden"),)),
        *versions.check_versions(versions.VersionFacts((3, 9), "", {"torch": None}), WORKER),
        *listening.check_listens((listening.ListenFacts(Address("--listen", "h:1"), "in use"),)),
    ]
    wrong = [one for one in bad if one.level in (Level.FAILED, Level.WARNING)]
    assert len(wrong) >= 15
    assert all(one.fix and one.what for one in wrong)


@pytest.mark.parametrize(
    ("files", "connections", "expected"),
    [(None, 16384, Level.OK), (20000, 16384, Level.OK), (1024, 16384, Level.WARNING), (4096, 0, Level.OK)],
)
def test_open_files_must_be_more_than_connections(files, connections, expected):
    facts, targets = replace(LIMITS, open_files=files), Targets("gateway", max_connections=connections)
    found = next(iter(limits.check_limits(facts, targets)))
    assert found.level is expected
    if expected is Level.WARNING:
        assert "ulimit -n 16896" in found.fix
        assert "--max-connections 512" in found.fix


def test_docker_s_shared_memory_is_too_little_for_nccl():
    facts = replace(LIMITS, shared_memory=64 << 20)
    assert worst(limits.check_limits(facts, WORKER)).level is Level.FAILED
    assert worst(limits.check_limits(facts, replace(WORKER, executor="cpu"))).level is Level.OK


def test_rdma_needs_locked_memory():
    facts = replace(LIMITS, locked_memory=8 << 20)
    assert worst(limits.check_limits(facts, replace(WORKER, transports=("rdma",)))).level is Level.FAILED
    assert worst(limits.check_limits(facts, replace(WORKER, transports=("tcp",)))).level is Level.OK


def test_nvidia_smis_output_is_parsed():
    (gpu,) = machine_gpus.parse_gpus(GPU_LINE + "\nno such line\n")
    assert (gpu.name, gpu.driver, gpu.free_mib, gpu.capability) == ("NVIDIA H100 80GB HBM3", "570.86.15", 81000, (9, 0))
    torch = machine_gpus.Torch("2.13.0+cu130", "13.0", True, 1)
    assert set(levels(gpus.check_gpus(machine_gpus.GpuFacts((gpu,), torch=torch), WORKER))) == {Level.OK}
    (silent,) = machine_gpus.parse_gpus("0, Tesla, 570, [N/A], [N/A], [N/A], [N/A], [Not Supported], [N/A]")
    assert (silent.total_mib, silent.capability, silent.uncorrected_errors) == (None, None, None)
    assert set(levels(gpus.check_gpus(machine_gpus.GpuFacts((silent,), torch=torch), WORKER))) == {Level.OK}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"capability": (7, 5)}, "8.0"),
        ({"uncorrected_errors": 3}, "gpu-reset"),
        ({"slowed_down": True}, "PERFORMANCE"),
        ({"celsius": 92}, "cooling"),
    ],
)
def test_a_gpu_that_is_not_well(change, word):
    gpu = replace(machine_gpus.parse_gpus(GPU_LINE)[0], **change)
    torch = machine_gpus.Torch("2.13.0+cu130", "13.0", True, 1)
    found = worst(gpus.check_gpus(machine_gpus.GpuFacts((gpu,), torch=torch), WORKER))
    assert found.level in (Level.FAILED, Level.WARNING)
    assert word in found.fix


@pytest.mark.parametrize(
    ("torch", "word"),
    [
        (machine_gpus.Torch("2.13.0+cpu", "", False, 0), "build for CPUs"),
        (machine_gpus.Torch("2.13.0", "13.0", False, 0), "sees no GPU"),
    ],
)
def test_a_torch_that_sees_no_gpu(torch, word):
    found = worst(gpus.check_gpus(machine_gpus.GpuFacts(machine_gpus.parse_gpus(GPU_LINE), torch=torch), WORKER))
    assert found.level is Level.FAILED
    assert word in found.what


def test_without_a_gpu_only_cuda_fails():
    facts = machine_gpus.GpuFacts(
        problem="nvidia-smi is not installed", torch=machine_gpus.Torch("2.13.0+cpu", "", False, 0)
    )
    assert worst(gpus.check_gpus(facts, WORKER)).level is Level.FAILED
    assert set(levels(gpus.check_gpus(facts, replace(WORKER, executor="cpu")))) == {Level.OK}


def test_rdma_ports_are_read_from_the_kernels_files(tmp_path):
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)")):
            (port / name).write_text(text + "\n")
    facts = fabric.observe_fabric(1.0, False, tmp_path)
    assert [(port.name, port.state) for port in facts.ports] == [("mlx5_0/1", "ACTIVE"), ("mlx5_1/1", "DOWN")]
    told = list(fabric.check_fabric(replace(facts, nixl="1.5"), replace(WORKER, transports=("rdma",))))
    assert worst(told).level is Level.WARNING
    assert any("400 Gb/sec" in one.what for one in told)


def test_a_transport_that_was_asked_for_must_be_there():
    told = list(fabric.check_fabric(_fabric(), replace(WORKER, transports=("rdma", "nccl"))))
    assert [one.what for one in told if one.level is Level.FAILED]
    assert levels(fabric.check_fabric(_fabric(), replace(WORKER, executor="cpu"))) == [Level.OK]
    down = replace(_fabric(), has_gpus=True, nvlinks_up=16, nvlinks_down=2, nccl="2.28", nixl="1.5")
    assert "fabricmanager" in worst(fabric.check_fabric(down, WORKER)).fix


def test_clocks():
    assert levels(clocks.check_clock(clocks.ClockFacts(True, 0.2))) == [Level.OK]
    assert levels(clocks.check_clock(clocks.ClockFacts(None))) == [Level.UNKNOWN]
    (kept, redis) = clocks.check_clock(clocks.ClockFacts(True, 42.0))
    assert (kept.level, redis.level) == (Level.OK, Level.WARNING)
    assert "42.0 s ahead" in redis.what


@pytest.mark.parametrize(
    ("facts", "level", "word"),
    [
        ({"version": "7.4.1", "role": "master", "persists": True}, Level.OK, "7.4.1"),
        ({"version": "5.0.9", "role": "master"}, Level.FAILED, "too old"),
        ({"version": "7.4.1", "role": "slave"}, Level.FAILED, "replica"),
        ({"version": "7.4.1", "role": "master", "policy": "allkeys-lru"}, Level.WARNING, "allkeys-lru"),
        ({"version": "7.4.1", "role": "master", "persists": False}, Level.WARNING, "no persistence"),
        ({"version": "7.4.1", "role": "master", "last_save_failed": True}, Level.WARNING, "save"),
        ({"problem": "invalid username-password pair"}, Level.FAILED, "password"),
    ],
)
def test_redis(facts, level, word):
    found = worst(redis_server.check_redis(redis_server.RedisFacts("redis://r:6379/0", **facts), Targets("kvstore")))
    assert found.level is level
    assert word in found.what


@pytest.mark.parametrize(
    ("answer", "connects", "level", "word"),
    [
        ("SERVING", True, Level.OK, ""),
        ("NOT_SERVING", True, Level.WARNING, "baton doctor router"),
        ("UNAVAILABLE: socket closed", True, Level.FAILED, "--tls-certificate"),
        ("Connection refused", False, Level.FAILED, "baton router --listen r:8200"),
    ],
)
def test_peers(answer, connects, level, word):
    (found,) = peers.check_peers(
        (peers.PeerFacts(Address("--router", "r:8200", "router"), connects, answer),), Targets()
    )
    assert found.level is level
    assert word in found.fix


@pytest.mark.parametrize(
    ("status", "slices", "level", "word"),
    [(403, 0, Level.FAILED, "rolebinding"), (401, 0, Level.FAILED, "serviceAccountName"), (0, 0, Level.FAILED, "443"),
     (200, 0, Level.WARNING, "0 replicas"), (200, 2, Level.OK, "")],
)  # fmt: skip
def test_rights_at_the_api_server(status, slices, level, word):
    problem = "" if status == 200 else "no"
    (found,) = kubernetes.check_watches((kubernetes.WatchFacts("k8s://baton/workers:8100", status, problem, slices),))
    assert found.level is level
    assert word in found.fix
    assert "kubectl -n baton" in found.fix or status not in (403, 200) or level is Level.OK


async def test_a_router_that_lacks_the_client_of_kubernetes_gets_the_line_that_installs_it(monkeypatch):
    for name in ("kubernetes", "kubernetes.aio.client"):
        monkeypatch.setitem(sys.modules, name, None)
    targets = Targets("router", watched=("k8s://baton/workers:8100",), kubernetes_url="http://127.0.0.1:1")
    (found,) = kubernetes.check_watches(await kubernetes.observe_watches(targets, 5))
    assert found.level is Level.FAILED
    assert "the package kubernetes is not installed" in found.what
    assert found.fix == 'pip install "baton-inference[kubernetes]"'


def test_a_model_that_does_not_fit_is_reported_with_both_sizes():
    facts = model.ModelFacts("m", True, architecture="LlamaForCausalLM", has_tokenizer=True, weight_bytes=140 * GIB)
    found = worst(model.check_model(facts, WORKER, model.Capacity(gpu=70 * GIB)))
    assert found.level is Level.FAILED
    assert "140.0 GiB" in found.what
    assert "70.0 GiB" in found.what
    assert worst(model.check_model(facts, WORKER, model.Capacity(gpu=300 * GIB))).level is Level.OK
    assert worst(model.check_model(facts, WORKER, model.Capacity())).level is Level.UNKNOWN


def test_a_folder_that_is_not_whole(tmp_path):
    targets = replace(WORKER, model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(16)
    (tmp_path / "model-1.safetensors").write_bytes(whole)
    assert weight_files.why_broken(tmp_path / "model-1.safetensors") == ""
    facts = model.observe_model(targets)
    assert facts.missing == ("model-2.safetensors",)
    (tmp_path / "model-2.safetensors").write_bytes(whole[:-5])
    assert model.observe_model(targets).broken == ("model-2.safetensors (5 bytes are missing)",)
    (tmp_path / "model-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    assert "Git LFS" in model.observe_model(targets).broken[0]
    (tmp_path / "config.json").write_text("{")
    assert "is no JSON" in worst(model.check_model(model.observe_model(targets), targets, model.Capacity())).what
    assert worst(model.check_model(model.observe_model(replace(targets, model="/no")), targets, model.Capacity())).fix


@pytest.mark.parametrize(
    ("architecture", "head_dim", "executor", "level"),
    [
        ("GemmaForCausalLM", 16, "cuda", Level.OK),
        ("MixtralForCausalLM", 16, "cuda", Level.OK),
        ("MixtralForCausalLM", 12, "cpu", Level.OK),
        ("MixtralForCausalLM", 12, "cuda", Level.FAILED),
    ],
)
def test_a_model_is_a_problem_only_where_it_does_not_run(architecture, head_dim, executor, level, tmp_path):
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    experts = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": head_dim}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **experts, "architectures": [architecture]}))
    targets = replace(WORKER, model=str(tmp_path), needs_weights=False, executor=executor)
    found = worst(model.check_model(model.observe_model(targets), targets, model.Capacity()))
    assert found.level is level
    assert (level is Level.OK) or "head_dim is 12" in found.what


def test_a_model_that_no_family_runs_may_be_one_of_transformers(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["BambaForCausalLM"]}')
    targets = replace(WORKER, model=str(tmp_path), needs_weights=False)
    found = worst(model.check_model(model.observe_model(targets), targets, model.Capacity()))
    assert found.level is Level.UNKNOWN
    assert "BambaForCausalLM" in found.what
    simulated = replace(targets, executor="sim")
    assert worst(model.check_model(model.observe_model(simulated), simulated, model.Capacity())).level is Level.OK


def test_certificates(tmp_path, capsys):
    assert make_certs(["--dir", str(tmp_path), "--fleet", "f"], {}) == 0
    capsys.readouterr()
    files = TlsFiles(*tls_flags(str(tmp_path), "router")[1::2])
    facts = certificates.observe_certificates(Targets("router", tls=files))
    (found,) = certificates.check_certificates(facts, Targets("router", tls=files), certificates.now())
    assert found.level is Level.OK
    (soon,) = certificates.check_certificates(facts, Targets("router", tls=files), facts[0].expires_at - 3600)
    assert soon.level is Level.WARNING
    others = certificates.observe_certificates(Targets("worker", tls=files))
    (wrong,) = certificates.check_certificates(others, Targets("worker", tls=files), certificates.now())
    assert wrong.level is Level.FAILED
    assert "must be that of a worker" in wrong.what


def test_a_services_requirements_are_those_of_its_package():
    requirements = [
        "grpcio>=1.71",
        'torch>=2.11; extra == "worker"',
        'triton>=3; sys_platform == "linux" and extra == "worker"',
        'orjson>=3; extra == "gateway"',
        'baton-inference[worker]; extra == "cuda"',
    ]
    assert extras.required_packages(requirements, ("worker",)) == ["grpcio", "torch", "triton"]
    assert extras.required_packages(requirements, ("cuda",)) == ["grpcio", "torch", "triton"]
    found = worst(versions.check_versions(versions.VersionFacts((3, 12), "0.1.0", {"torch": None}), WORKER))
    assert found.fix == 'pip install "baton-inference[worker]"'


@pytest.mark.parametrize(
    ("missing", "level", "fix"),
    [
        ({"gateway": [], "worker": []}, Level.OK, ""),
        ({"gateway": [], "worker": ["torch", "numpy"]}, Level.WARNING, 'pip install "baton-inference[worker]"'),
        ({"gateway": ["orjson"], "worker": ["torch"]}, Level.FAILED, 'pip install "baton-inference[all]"'),
    ],
)
def test_without_a_service_every_service_that_cannot_start_is_found(missing, level, fix):
    found = worst(versions.check_versions(versions.VersionFacts((3, 12), "0.1.0", {}, missing), Targets()))
    assert found.level is level
    assert found.fix == fix


def test_settings_select_the_examined_targets():
    from baton.router.config import RouterConfig

    config = RouterConfig(workers=("a:1", "k8s://ns/w:8100"), kvstore="k:1,l:2", metrics_listen="0.0.0.0:9")
    targets = targets_of("router", config)
    assert [(one.flag, one.address) for one in targets.peers] == [
        ("--kvstore", "k:1"),
        ("--kvstore", "l:2"),
        ("--workers", "a:1"),
    ]
    assert targets.watched == ("k8s://ns/w:8100",)
    assert [one.flag for one in targets.listens] == ["--listen", "--metrics-listen"]


@pytest.mark.parametrize(
    "words", [["nothing"], ["--no-such-flag"], ["--look-timeout", "soon"], ["worker", "--look-timeout"]]
)
def test_a_wrong_command_line_is_code_2_or_a_finding(words, capsys):
    assert cli.main(["doctor", *words], {}) == 2
    assert "baton doctor: " in capsys.readouterr().err


def test_a_services_wrong_setting_is_a_finding_and_the_machine_is_examined_all_the_same(capsys):
    assert cli.main(["doctor", "router", "--json", "--listen", "nowhere"], {}) == 1
    document = json.loads(capsys.readouterr().out)
    first, *others = document["findings"]
    assert (first["topic"], first["level"]) == ("settings", "failed")
    assert "listen='nowhere'" in first["what"]
    assert {"versions", "limits"} <= {one["topic"] for one in others}
    assert document["counts"]["failed"] == 1


def _fabric():
    return fabric.FabricFacts(False, 0, 0, "", (), "", "", False)
