"""The installed Transformers: its causal language models, and their configs and modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from baton.rpc.errors import InvalidRequest
from baton.worker.models.fields import Fields

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

INSTALL = "pip install 'baton-inference[transformers]'"
_FLOAT = "__float__"
# Fields of config.json that change no result.
_IRRELEVANT = (
    "transformers_version",
    "_name_or_path",
    "architectures",
    "auto_map",
    "eos_token_id",
    "dtype",
    "torch_dtype",
)


def is_installed() -> bool:
    """Returns whether Transformers of a supported version can be imported."""
    return _version() is not None


def version(fields: Fields) -> str:
    """Returns the version of Transformers. Raises InvalidRequest if none is installed."""
    found = _version()
    if found is None:
        raise InvalidRequest(
            f"{fields.source}: model_impl=transformers needs Transformers 5 or newer: {INSTALL}", field="model_impl"
        )
    return found


@cache
def _version() -> str | None:
    try:
        import transformers
    except ImportError:
        return None
    found: str = transformers.__version__
    return found if int(found.split(".")[0]) >= 5 else None


@cache
def causal_architectures() -> frozenset[str]:
    """Returns the names of its causal language models; none if it is not installed."""
    return frozenset(name for names in _by_model_type().values() for name in names)


def architecture_of(fields: Fields) -> str:
    """Returns the name of the architecture in config.json, else of the one of its model_type; "" without both."""
    names = fields.raw.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return next(iter(_by_model_type().get(str(fields.raw.get("model_type")), ())), "")


@cache
def _by_model_type() -> Mapping[str, tuple[str, ...]]:
    if _version() is None:
        return {}
    from transformers.models.auto import modeling_auto

    entries = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in entries}


def model_class(name: str) -> type[PreTrainedModel]:
    """Returns a class of `causal_architectures`."""
    import transformers

    found: type[PreTrainedModel] = getattr(transformers, name)
    return found


def takes_attention(name: str) -> bool:
    """Returns whether the layers call Transformers' attention interface, as far as their source shows."""
    shows: Callable[[], bool] | None = getattr(model_class(name), "_can_set_attn_implementation", None)
    return shows is None or shows()


def takes_experts(name: str) -> bool:
    """Returns whether the layers call Transformers' experts interface, as far as their source shows."""
    shows: Callable[[], bool] | None = getattr(model_class(name), "_can_set_experts_implementation", None)
    return shows is None or shows()


def config_of(name: str, raw: Mapping[str, Any], source: str) -> PreTrainedConfig:
    """Returns the config of a causal language model. Raises InvalidRequest for values that its class refuses."""
    config_class = model_class(name).config_class
    assert config_class is not None, "every model has one"
    values = _with_floats({key: value for key, value in raw.items() if key != "auto_map"})
    with quiet():
        made: PreTrainedConfig = explained(
            lambda: config_class.from_dict(values), f"{source}: Transformers refuses it for {name}"
        )
    return made


def _with_floats(value: Any) -> Any:
    """Returns JSON with the floats that Transformers spells as objects, such as infinity."""
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    return {key: _with_floats(each) for key, each in value.items()}


def canonical(raw: Mapping[str, Any]) -> str:
    """Returns the fields of config.json that may change results, as JSON in one order."""
    return json.dumps({key: value for key, value in raw.items() if key not in _IRRELEVANT}, sort_keys=True)


def explained(make: Callable[[], Any], what: str) -> Any:
    """Returns what `make` does. Raises InvalidRequest, which begins with `what`, for its errors of any kind."""
    try:
        return make()
    except InvalidRequest:
        raise
    except Exception as error:
        # Modeling code of a hundred architectures raises whatever it meets first.
        first = " ".join(str(error).split())[:300]
        raise InvalidRequest(f"{what}: {type(error).__name__}: {first}", field="model") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silences Transformers' own log lines and progress bars."""
    from transformers.utils import logging as found

    logging: Any = found
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def made_of(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model on PyTorch's default device, with random weights where that is not "meta"."""
    made: Any = model_class(name)
    model: PreTrainedModel = made._from_config(config, dtype=dtype).eval()
    return model
