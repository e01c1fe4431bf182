import huggingface_hub
import pytest

from baton.services.settings import SettingsError
from baton.services.up import model_source
from baton.services.up.model_source import SAMPLE_MODELS, resolve_model


def test_the_checkouts_sample_model_is_the_default():
    checkout, _ = SAMPLE_MODELS
    assert resolve_model("") == str(checkout)
    assert (checkout / "model.safetensors").is_file()


def test_where_there_is_no_sample_model_the_flag_is_named(monkeypatch):
    monkeypatch.setattr(model_source, "SAMPLE_MODELS", ())
    with pytest.raises(SettingsError, match="--model is required"):
        resolve_model("")


@pytest.mark.parametrize("model", ["/no/such", "./no-such", "no-such", "a/b/c"])
def test_a_model_that_is_neither_folder_nor_hub_id_is_refused(model):
    with pytest.raises(SettingsError, match=r"--model: '.*' is no folder; give a Hugging Face model folder"):
        resolve_model(model)


def test_a_hub_id_that_cannot_be_had_is_refused_in_one_line(monkeypatch):
    def unreachable(hub_id, **_):
        raise ConnectionError(f"{hub_id} cannot be reached\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(SettingsError) as raised:
        resolve_model("someone/story")
    assert str(raised.value) == (
        "--model: 'someone/story' is no folder, and not to be had from the hub: someone/story cannot be reached"
    )


def test_a_revision_is_of_a_hub_id(tmp_path, monkeypatch):
    asked = []

    def download(hub_id, revision, allow_patterns):
        asked.append((hub_id, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("some-org/some-model", "v1.0") == str(tmp_path)
    assert asked == [("some-org/some-model", "v1.0")]
    for model in ("", str(tmp_path)):
        with pytest.raises(SettingsError, match=r"--revision: v1\.0 is of a hub id; --model is .*, a folder"):
            resolve_model(model, "v1.0")
