import json

import pytest

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.calibration import read_device
from baton.services.simulate.cluster.device import DeviceModel

TRUE = DeviceModel(
    base=5e-3, per_prefill_token=30e-6, per_prefill_pair=2e-9, per_decode_request=20e-6, per_context_token=40e-9
)


def measured(count, own, output, shared=0):
    """A row as the engine's benchmark writes it, of a device that is TRUE."""
    prompt, tokens = shared + own, shared + count * own
    pairs = shared * shared / 2 + count * own * (shared + own / 2)
    decodes = count * (output - 1)
    seconds = (
        TRUE.base * (max(1.0, tokens / 8192) + output - 1)
        + TRUE.per_prefill_token * tokens
        + TRUE.per_prefill_pair * pairs
        + TRUE.per_decode_request * decodes
        + TRUE.per_context_token * decodes * (prompt + output / 2)
    )
    sizes = {"num_requests": count, "num_own": own, "num_shared": shared, "num_output": output}
    return {"model": "m", "seconds": seconds, **sizes}


@pytest.fixture
def report(tmp_path):
    def write(*rows):
        path = tmp_path / "engine.json"
        path.write_text(json.dumps({"engines": [{"config": {"max_num_batched_tokens": 8192}, "rows": rows}]}))
        return path

    return write


def test_the_device_that_was_measured_is_found(report):
    rows = [measured(1, 128, 256), measured(64, 512, 256), measured(256, 512, 256), measured(16, 8192, 2)]
    rows += [measured(512, 1024, 128), measured(32, 2048, 64), measured(256, 64, 32, shared=4096)]
    found = read_device(report(*rows), "", DeviceModel())
    for name in ("base", "per_prefill_token", "per_prefill_pair", "per_decode_request", "per_context_token"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    assert found.kv_bytes_per_token == DeviceModel().kv_bytes_per_token


def test_no_constant_is_negative(report):
    noisy = [measured(1, 128, 256), measured(64, 512, 256), measured(256, 512, 256), measured(16, 8192, 2)]
    noisy[1]["seconds"] *= 1.4
    noisy[3]["seconds"] *= 0.6
    found = read_device(report(*noisy), "m", DeviceModel())
    assert min(found.base, found.per_prefill_pair, found.per_decode_request, found.per_context_token) >= 0


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="no output of `baton bench engine"):
        read_device(path, "", DeviceModel())


def test_a_model_that_was_not_measured_is_refused(report):
    with pytest.raises(InvalidRequest, match=r"0 rows of model 'other'.*it has models m"):
        read_device(report(measured(1, 128, 256)), "other", DeviceModel())
