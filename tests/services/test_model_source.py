import pytest

from baton.services.model_source import SAMPLE_MODEL, resolve_model
from baton.services.settings import SettingsError


def test_the_checkouts_sample_model_is_the_default():
    assert resolve_model("") == str(SAMPLE_MODEL)
    assert (SAMPLE_MODEL / "model.safetensors").is_file()


@pytest.mark.parametrize("model", ["/no/such", "./no-such", "no-such", "a/b/c"])
def test_a_model_that_is_neither_folder_nor_hub_id_is_refused(model):
    with pytest.raises(SettingsError, match=r"--model: '.*' is no folder; give a Hugging Face model folder"):
        resolve_model(model)


def test_a_hub_id_that_cannot_be_had_is_refused_in_one_line(monkeypatch):
    import huggingface_hub

    def unreachable(hub_id, **_):
        raise ConnectionError(f"{hub_id} cannot be reached\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(SettingsError) as raised:
        resolve_model("someone/story")
    assert str(raised.value) == (
        "--model: 'someone/story' is no folder, and not to be had from the hub: someone/story cannot be reached"
    )
