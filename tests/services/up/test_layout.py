"""Which executor, workers and devices a machine gets."""

import pytest

from baton.services import settings
from baton.services.machine.devices import Devices, usable_devices
from baton.services.machine.gpus import Gpu
from baton.services.settings import SettingsError
from baton.services.up.config import UpConfig
from baton.services.up.layout import Counts, choose_layout

NONE = Devices(problem="no NVIDIA GPU (nvidia-smi is not installed)")
TWO = Devices(("0", "1"), "2 x NVIDIA H100", order="PCI_BUS_ID")


def gpu(index, name="NVIDIA H100", capability=(9, 0)):
    return Gpu(index, name, "580", 81559, 81000, capability, 0, False, 35)


def placed(layout):
    return [(worker.worker_id, worker.variables.get("CUDA_VISIBLE_DEVICES")) for worker in layout.workers]


def test_without_a_gpu_one_worker_on_the_cpu_does_both_and_the_reason_is_given():
    layout = choose_layout("auto", None, NONE)
    assert (layout.executor, placed(layout)) == ("cpu", [("both-0", None)])
    assert layout.reasons[0] == "executor cpu: no NVIDIA GPU (nvidia-smi is not installed)"


def test_each_gpu_gets_a_worker_that_does_both():
    layout = choose_layout("auto", None, TWO)
    assert (layout.executor, placed(layout)) == ("cuda", [("both-0", "0"), ("both-1", "1")])
    assert layout.reasons[0] == "executor cuda: 2 x NVIDIA H100"


def test_counts_that_are_set_split_the_gpus():
    layout = choose_layout("auto", Counts(prefill=1, decode=1), TWO)
    assert placed(layout) == [("prefill-0", "0"), ("decode-0", "1")]
    assert layout.reasons[1] == "workers: 1 prefill, 1 decode (as set)"


def test_an_executor_that_is_set_is_kept():
    assert choose_layout("cpu", None, TWO).executor == "cpu"
    assert choose_layout("sim", Counts(both=3), NONE).executor == "sim"


def test_cuda_without_a_gpu_is_refused_with_the_reason():
    with pytest.raises(SettingsError, match=r"--executor cuda: no NVIDIA GPU \(nvidia-smi is not installed\)"):
        choose_layout("cuda", None, NONE)


def test_more_workers_than_gpus_need_the_memory_of_each():
    with pytest.raises(SettingsError, match=r"4 workers \(1 prefill, 3 decode\) do not fit on 2 GPUs"):
        choose_layout("cuda", Counts(prefill=1, decode=3), TWO)
    layout = choose_layout("cuda", Counts(prefill=1, decode=3), TWO, may_share=True)
    assert [device for _, device in placed(layout)] == ["0", "1", "0", "1"]


def test_devices_of_nvidia_smi_are_numbered_as_it_numbers_them():
    devices = usable_devices([gpu(0), gpu(1)], None)
    assert devices.variables(1) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("1", ("1",)),
        ("1,0", ("1", "0")),
        ("GPU-8a56a4bc,MIG-1", ("GPU-8a56a4bc", "MIG-1")),
        ("0,7", ("0",)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_cuda_visible_devices_limits_the_devices(visible, ids):
    devices = usable_devices([gpu(0), gpu(1)], visible)
    assert devices.ids == ids
    assert bool(devices.problem) == (not ids)
    assert f"CUDA_VISIBLE_DEVICES={visible}" in (devices.summary or devices.problem).replace("'", "")


def test_gpus_that_are_too_old_are_left_out_and_named():
    assert usable_devices([gpu(0, "NVIDIA T4", (7, 5)), gpu(1)], None).ids == ("1",)
    devices = usable_devices([gpu(0, "NVIDIA T4", (7, 5))], None)
    assert devices.problem == "1 x NVIDIA T4: compute capability below 8.0"


@pytest.mark.parametrize("form", ["flags", "long flags", "keys"])
def test_up_takes_the_counts_that_serve_takes(form, tmp_path):
    argv = ["--prefill", "2", "--decode=3"]
    if form == "long flags":
        argv = ["--prefill-workers", "2", "--decode-workers=3"]
    elif form == "keys":
        (tmp_path / "up.yaml").write_text("prefill: 2\ndecode: 3\n")
        argv = [f"--config={tmp_path / 'up.yaml'}"]
    (config,) = settings.load("up", (UpConfig,), argv, {}, "")
    assert (config.counts.prefill, config.counts.decode, config.counts.both) == (2, 3, 0)
    with pytest.raises(settings.SettingsError, match="'x' is not allowed"):
        settings.load("up", (UpConfig,), ["--prefill", "x"], {}, "")
