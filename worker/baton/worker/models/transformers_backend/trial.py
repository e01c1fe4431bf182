"""One forward pass on PyTorch's meta device: how a model of Transformers attends, without weights and values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from baton.worker.models.transformers_backend.installed import explained, made_of, quiet
from baton.worker.models.transformers_backend.masks import window_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = "baton-trial"  # the name of this module's attention in Transformers
# Has the same result as its other forms, and reads no values.
EXPERTS = "batched_mm"
_NUM_TOKENS = 5
_PROBE = "baton_trial"  # attribute of modules
_WINDOW = "baton_window"  # attribute of masks
_OWN = "a mask of its own"
# Arguments of attention that change nothing here.
_IGNORED = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_router_logits", "logits_to_keep"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of attention by a layer."""

    module: str
    query: tuple[int, ...]  # [1, heads, tokens, head_dim]
    key: tuple[int, ...]
    value: tuple[int, ...]
    scale: float
    window: int | None  # 0: all keys; None: the mask is neither causal nor a window
    soft_cap: float
    sinks: str  # name of the parameter; "" without
    unknown: tuple[str, ...]  # arguments that Baton's attention does not take


@dataclass(slots=True)
class Trial:
    """What a forward pass did."""

    model: PreTrainedModel  # on the meta device
    calls: list[Call] = field(default_factory=list)
    body: str = ""  # name of the first module that the model itself calls
    reads_values: bool = False
    num_logits: int = 0  # of a token

    @property
    def takes_positions(self) -> bool:
        """Whether positions can be given for each token."""
        return "position_ids" in inspect.signature(type(self.model.get_submodule(self.body)).forward).parameters


def try_out(name: str, config: PreTrainedConfig, source: str) -> Trial:
    """Runs the model once. Raises InvalidRequest if it cannot be made, or cannot run without values."""
    _register()
    config._attn_implementation, config._experts_implementation = ATTENTION, EXPERTS
    with quiet(), torch.device("meta"):
        made = explained(lambda: made_of(name, config, torch.float32), f"{source}: Transformers makes no {name}")
        trial = Trial(made)
        explained(lambda: _run(trial), f"{source}: {name} cannot run with model_impl=transformers")
    return trial


def _run(trial: Trial) -> None:
    model = trial.model
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    hooks = []
    for name, module in model.named_modules():
        module.__dict__[_PROBE] = _Probe(name, names, trial)
        if name:
            hooks.append(module.register_forward_pre_hook(_noting(trial, name)))
    token_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long)
    mode = _NoValues()
    with torch.no_grad(), mode:
        # With a mask, Transformers does not look for several sequences in the positions.
        mask = torch.ones_like(token_ids)
        try:
            output = model(input_ids=token_ids, attention_mask=mask, position_ids=token_ids, use_cache=False)
        except NotImplementedError as error:
            raise NotImplementedError("its forward pass needs values on the host, such as experts' loads") from error
    for hook in hooks:
        hook.remove()
    trial.reads_values = mode.reads_values
    trial.num_logits = output.logits.shape[-1]


def _noting(trial: Trial, name: str) -> Callable[[nn.Module, Any], None]:
    def note(_module: nn.Module, _arguments: Any) -> None:
        trial.body = trial.body or name

    return note


@dataclass(frozen=True, slots=True)
class _Probe:
    """Records the calls of one module."""

    name: str
    parameters: Mapping[int, str]
    trial: Trial

    def record(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, more: Mapping[str, Any]) -> None:
        window, sinks = more.get("sliding_window"), more.get("s_aux")
        known = {"scaling", "sliding_window", "softcap", "s_aux"} | _IGNORED
        unknown = [key for key, given in more.items() if given is not None and key not in known]
        if sinks is not None and id(sinks) not in self.parameters:
            unknown.append("s_aux")
        scale = more.get("scaling")
        call = Call(
            self.name,
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            float(query.shape[-1] ** -0.5 if scale is None else scale),
            getattr(mask, _WINDOW, None) if mask is not None else window or 0,
            float(more.get("softcap") or 0.0),
            self.parameters.get(id(sinks), ""),
            tuple(unknown),
        )
        self.trial.calls.append(call)


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers reads of values that do not exist as if all were 0, and notes them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta and packet in _READS:
            self.reads_values = True
            return _READS[packet](first)
        return func(*args, **(kwargs or {}))


_READS: Mapping[Any, Callable[[Tensor], Any]] = {
    torch.ops.aten._local_scalar_dense: lambda tensor: 0,
    torch.ops.aten.is_nonzero: lambda tensor: False,
    torch.ops.aten.equal: lambda tensor: False,
    torch.ops.aten.nonzero: lambda tensor: torch.empty(0, tensor.dim(), dtype=torch.long, device="meta"),
}


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **more: Any
) -> tuple[Tensor, None]:
    getattr(module, _PROBE).record(query, key, value, attention_mask, more)
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


def _mask(mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **_more: Any) -> Tensor:
    """Returns a mask without values that has its window as an attribute."""
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    try:
        with torch.device("cpu"):
            setattr(mask, _WINDOW, window_of(mask_function))
    except (RuntimeError, IndexError):
        setattr(mask, _WINDOW, None)  # it depends on more than positions
    return mask


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _mask)
