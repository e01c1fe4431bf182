"""The adapters of the CUDA executor: their slots, and the rows of its steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from baton.rpc.errors import InvalidRequest
from baton.worker.adapters.bank import AdapterBank, slot_size
from baton.worker.adapters.base_model import BaseModel, base_model_of
from baton.worker.adapters.device import AdapterDevice
from baton.worker.adapters.ops import SiteUpdates
from baton.worker.adapters.tensors import TensorAdapters
from baton.worker.config import WorkerConfig
from baton.worker.core import Int64, StepPlan
from baton.worker.executors.cuda.adapters.device_rows import DeviceRows
from baton.worker.executors.cuda.adapters.slot_copies import SlotCopies
from baton.worker.executors.cuda.adapters.updates import CudaUpdates
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.device import Device
from baton.worker.models.config import ModelConfig

_GIB = 1 << 30


class CudaAdapters(TensorAdapters):
    """The adapters of an executor on a GPU."""

    def __init__(self, config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        base = base_model_of(model, dtype)
        bank = _make_bank(config, base, dtype, device)
        super().__init__(base, bank, config.max_num_requests, dtype)
        self.rows = DeviceRows(bank, max(config.max_num_batched_tokens, config.max_num_requests), device)
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return self.bank.num_bytes

    def upload(self, plan: StepPlan, num_rows: int) -> bool:
        """Uploads the rows of a step that is padded to `num_rows` tokens. Returns whether any has an adapter."""
        slots = self.slots_of(plan)
        if slots is not None:
            self.rows.upload(slots, num_rows)
        return slots is not None

    def head_used(self, rows: Int64) -> AbstractContextManager[None]:
        """Has logits computed with the updates of `rows`, one for each state; -1: of none."""
        slots = self.head_slots(rows)
        if slots is None:
            return nullcontext()
        self.rows.upload(slots, len(slots))
        return self.rows.used(len(slots))

    def device_over(self, device: Device[StepInputs]) -> AdapterDevice[StepInputs]:
        """Returns a device that adds the updates."""
        # Imported here, because CPUs have no Triton.
        from baton.kernels.adapters.add import add_adapters
        from baton.kernels.adapters.embed import embed_adapters

        return AdapterDevice(device, self.bank, self.base, self._updates, add_adapters, embed_adapters)

    def _updates(self, name: str) -> SiteUpdates:
        return CudaUpdates(self.bank.sites[name], self.bank.ends(name), self._beside)


def _make_bank(config: WorkerConfig, base: BaseModel, dtype: torch.dtype, device: torch.device) -> AdapterBank:
    num_slots, max_rank, expert_rank = config.max_loras, config.max_lora_rank, config.max_lora_expert_rank
    needed = num_slots * slot_size(base, max_rank, expert_rank) * dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise InvalidRequest(
            f"max_loras={num_slots} adapters of max_lora_rank={max_rank}"
            f"{f' and max_lora_expert_rank={expert_rank}' if expert_rank else ''} need {needed / _GIB:.1f} GiB; "
            f"{free / _GIB:.1f} GiB are free: lower either, or take a larger GPU",
            field="max_loras",
        )
    return AdapterBank(base, num_slots, max_rank, dtype, device, SlotCopies(device), expert_rank=expert_rank)
