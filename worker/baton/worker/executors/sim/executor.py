"""The simulated device: a calibrated clock, and small KV. Does not import PyTorch.

Its output is a function of all earlier tokens, read back from the blocks. So prefix reuse, preemption and transfers are
correct exactly when the tokens are the same. It ignores penalties and logit_bias.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InvalidRequest, Mismatch, Unsupported
from baton.worker.core import BlockId, Int32, Int64, ModelSpec, RowInit, StepPlan, StepResult, TokenLogprobs, TokenMasks
from baton.worker.executors.base import LayerHook, NewWeights
from baton.worker.executors.facts import DeviceFacts
from baton.worker.executors.memory_part import ALL_PARTS, MemoryPart
from baton.worker.executors.sim.adapters import SimAdapters
from baton.worker.executors.sim.draws import SimDraws
from baton.worker.executors.sim.host_copies import SimHost
from baton.worker.executors.sim.kv import SimKv, UInt64, mix
from baton.worker.kv_spec import full_spec
from baton.worker.sampling.processors.processor_set import NO_PROCESSORS
from baton.worker.speculation.simulated import SimulatedDrafts

if TYPE_CHECKING:
    from baton.worker.weights.tensor_update import TensorUpdate

_WORD_BYTES = 8
_DIGEST_BYTES = 16
_STALL_POLL_SECONDS = 0.01  # while stalled


@dataclass(frozen=True, slots=True)
class SimSpeed:
    """The duration of a step as a linear function of its load. The defaults are close to an 8B model on one H200."""

    base: float = 4.4e-3
    per_prefill_token: float = 26e-6
    per_decode_request: float = 12e-6
    per_context_token: float = 30e-9  # of decoding requests
    per_copied_token: float = 2.6e-6  # to or from host memory
    factor: float = 1.0  # multiplies all times; 0: steps take no time

    def step_seconds(self, plan: StepPlan, num_drafts: int = 0) -> float:
        """Returns the duration of the plan's step. A draft takes as long as a request that decodes."""
        num_decodes = plan.num_decodes
        num_prefill_tokens = plan.num_prefill_tokens
        num_context_tokens = int(plan.num_computed_tokens[:num_decodes].sum())
        return self.factor * (
            self.base
            + self.per_prefill_token * num_prefill_tokens
            + self.per_decode_request * (num_decodes + num_drafts)
            + self.per_context_token * num_context_tokens
        )


@dataclass(frozen=True, slots=True)
class SimSettings:
    """The simulated model and device."""

    num_blocks: int = 4096
    block_size: int = 16
    max_num_requests: int = 256
    max_model_len: int = 8192
    vocab_size: int = 4096
    first_token_id: int = 5  # lower ones are special and never generated, except end-of-sequence
    eos_token_ids: tuple[int, ...] = (2,)
    eos_every: int = 0  # mean number of tokens until end-of-sequence; 0: never
    num_layers: int = 2
    num_host_blocks: int = 0  # blocks of host memory
    host_staging_blocks: int = 64  # most blocks in copies to host memory
    depth: int = 1
    max_step_tokens: int = 1  # most tokens of a decode; the number depends on earlier output
    acceptance: float | None = None  # chance of each draft; None: any number of tokens is as likely, and takes no time
    max_loras: int = 0  # adapters on the device; 0: none can be used
    adapter_read_seconds: float = 0.0  # from files to host memory
    adapter_write_seconds: float = 0.0  # from there to the device
    digest: bytes = b""  # empty: computed from the model's values above
    speed: SimSpeed = field(default_factory=SimSpeed)

    def validate(self) -> None:
        """Raises InvalidRequest for invalid settings."""
        for name in ("num_blocks", "block_size", "max_num_requests", "max_model_len", "num_layers", "depth",
                     "max_step_tokens"):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 1", field=name)
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise InvalidRequest(f"acceptance is {self.acceptance}; it must be from 0 to 1", field="acceptance")
        for name in ("num_host_blocks", "host_staging_blocks"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must not be negative", field=name)
        if not 0 <= self.first_token_id < self.vocab_size - len(self.eos_token_ids):
            raise InvalidRequest(
                f"first_token_id is {self.first_token_id}, vocab_size {self.vocab_size}: nothing is left to generate",
                field="first_token_id",
            )
        if len(self.digest) not in (0, _DIGEST_BYTES):
            raise InvalidRequest(f"digest has {len(self.digest)} bytes; it must have {_DIGEST_BYTES}", field="digest")

    @property
    def model_digest(self) -> bytes:
        """Returns the digest of the settings that change tokens or KV."""
        model = (self.vocab_size, self.first_token_id, self.eos_token_ids, self.eos_every, self.num_layers)
        return self.digest or hashlib.blake2b(repr(model).encode(), digest_size=_DIGEST_BYTES).digest()


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    starts: float
    ends: float
    idle: float | None  # seconds of the device before it
    masks: TokenMasks | None
    drafted: Int64 | None = None  # drafts of each decode; None: without speculation
    undrawn: Int32 = field(default_factory=lambda: np.empty(0, np.int32))


class SimExecutor:
    """Implements Executor without a device. `clock` and `sleep` may be virtual."""

    def __init__(
        self,
        settings: SimSettings,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        read_settings: Callable[[str], SimSettings] | None = None,  # of another model; None: no other model
        is_stalled: Callable[[], bool] | None = None,  # while so, no step ends
    ) -> None:
        settings.validate()
        self.processors = NO_PROCESSORS
        self.model = ModelSpec(
            settings.model_digest, settings.vocab_size, settings.max_model_len, settings.eos_token_ids
        )
        self.kv_spec = full_spec(settings.model_digest, "simulated", settings.num_layers, 1, 1, settings.block_size)
        self.facts = DeviceFacts("simulated", "a clock", settings.num_layers, "none", "none", "none", weight_bytes=0)
        self.num_blocks = settings.num_blocks
        self.depth = settings.depth
        self.max_step_tokens = settings.max_step_tokens
        self.max_masked_tokens = 1
        chance = settings.acceptance
        self._drafts = None if chance is None else SimulatedDrafts(settings.max_num_requests, chance)
        self.kv = None
        self._layer_hook: LayerHook | None = None
        self.kv_bytes: Sequence[NDArray[np.uint8]] | None = None
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._read_settings = read_settings
        self._is_stalled = is_stalled
        self._source = ""
        self.adapters = _adapters(settings)
        self._kv = SimKv(settings.num_layers, settings.num_blocks, settings.block_size)
        self.host = self._make_host()
        self._launched: deque[_Launched] = deque()
        self._ended: float | None = None  # when the last launched step ends
        self._draws = SimDraws(
            settings.max_num_requests,
            settings.vocab_size,
            settings.first_token_id,
            settings.eos_token_ids,
            settings.eos_every,
        )
        num_rows = settings.max_num_requests
        max_blocks = -(-settings.max_model_len // settings.block_size) + 1
        self._tables = np.zeros((num_rows, max_blocks), np.int32)
        self._table_lens = [0] * num_rows
        self._prompts: list[UInt64] = [np.empty(0, np.uint64)] * num_rows  # tokens known at the row's admission
        self._num_known = np.zeros(num_rows, np.int64)  # lengths of _prompts
        self._num_computed = np.zeros(num_rows, np.int64)
        self._last_tokens = np.zeros(num_rows, np.uint64)
        self._digests = np.zeros(num_rows, np.uint64)
        self._salts = np.zeros(num_rows, np.uint64)  # of the rows' adapters

    def launch(self, plan: StepPlan) -> None:
        """Queues the step after those in flight."""
        starts = self._clock()
        if self._launched:
            starts = max(starts, self._launched[-1].ends)
        idle = None if self._ended is None else max(0.0, starts - self._ended)
        drafted = None if self._drafts is None else self._drafts.choose(plan)
        num_drafts = 0 if drafted is None else int(drafted.sum())
        self._ended = starts + self._settings.speed.step_seconds(plan, num_drafts)
        self._launched.append(_Launched(plan, starts, self._ended, idle, plan.masks, drafted))
        if self.host is not None:
            self.host.num_launched += 1

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Stores the masks and undrawn rows of the last launched step."""
        step = self._launched[-1]
        assert step.plan.masks_follow, f"step {step.plan.step} has its masks"
        step.masks, step.undrawn = masks, undrawn

    def collect(self) -> StepResult:
        """Computes the oldest launched step and sleeps for its duration. Calls the layer hook when each layer is due.

        Computes as late as a device might, so that a block that is reused too early changes the output.
        """
        step = self._launched.popleft()
        if self.host is not None:
            self.host.before_step()
        self._apply(step.plan)
        result = self._compute(step)
        result.seconds = step.ends - step.starts
        result.idle_seconds = step.idle
        self._call_layer_hook(step)
        self._wait(step.ends)
        while self._is_stalled is not None and self._is_stalled():
            self._sleep(_STALL_POLL_SECONDS)
        return result

    def ended(self) -> bool:
        """Returns True, because `collect` computes the step."""
        return True

    def watch(self, wake: Callable[[], None] | None) -> None:
        """Does nothing, because no step ends asynchronously."""

    def watch_layers(self, hook: LayerHook | None) -> None:
        self._layer_hook = hook

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray | memoryview:
        """Copies one layer out of these blocks."""
        blocks = self._kv.words[layer].reshape(-1, self.kv_spec.block_size)
        return bytearray(blocks[np.asarray(block_ids, np.int64)].tobytes())

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one layer into these blocks, which have one head."""
        if heads not in (None, (0, 1)):
            raise InvalidRequest(f"KV heads {heads} do not exist: there is one", field="heads")
        expected = len(block_ids) * self.kv_spec.layer_bytes(layer)
        if len(data) != expected:
            raise Mismatch(f"{len(block_ids)} blocks of one layer are {expected} bytes, not {len(data)}")
        blocks = self._kv.words[layer].reshape(-1, self.kv_spec.block_size)
        words = np.frombuffer(data, np.uint64).reshape(len(block_ids), -1)
        blocks[np.asarray(block_ids, np.int64)] = words

    def close(self) -> None:
        """Frees the device. Idempotent."""
        self._launched.clear()

    def read_weights(self, model: str) -> NewWeights:
        """Reads the settings of another model. There are no weights."""
        source = model or self._source
        if self._read_settings is None or not source:
            return NewWeights(source, self.kv_spec.model_digest, None)
        new = self._read_settings(source)
        for name in ("vocab_size", "max_model_len", "eos_token_ids"):
            ours, theirs = getattr(self._settings, name), getattr(new, name)
            if ours != theirs:
                raise Mismatch(
                    f"model={source!r} has another architecture than what is served: {name} is {theirs}, not {ours}",
                    field="model",
                )
        return NewWeights(source, new.model_digest, None)

    def new_update(self) -> TensorUpdate:
        """Raises Unsupported."""
        raise Unsupported("executor=sim has no weights to update")

    def read_update(self, update: TensorUpdate) -> NewWeights:
        """Raises Unsupported."""
        raise Unsupported("executor=sim has no weights to update")

    def use_weights(self, new: NewWeights) -> None:
        """Changes the digest."""
        self._source = new.model
        self.model = replace(self.model, digest=new.digest)
        self.kv_spec = replace(self.kv_spec, model_digest=new.digest)

    def sleep(self, level: int) -> int:
        """Frees the blocks' words at any level."""
        return self._kv.free()

    def wake(self, new: NewWeights | None, parts: frozenset[MemoryPart] = ALL_PARTS) -> None:
        """Allocates the words again, as zeros."""
        if MemoryPart.KV_CACHE in parts:
            self._kv.allocate()
        if new is not None:
            self.use_weights(new)

    def _make_host(self) -> SimHost | None:
        settings = self._settings
        if not settings.num_host_blocks:
            return None
        seconds = settings.speed.factor * settings.speed.per_copied_token * settings.block_size
        return SimHost(
            self._kv, settings.num_host_blocks, settings.host_staging_blocks, seconds, self._clock, self._sleep
        )

    def _call_layer_hook(self, step: _Launched) -> None:
        hook = self._layer_hook
        if hook is None:
            return
        num_layers = self.kv_spec.num_layers
        for layer in range(num_layers):
            if step.plan.num_decodes < len(step.plan.rows):
                self._wait(step.starts + (step.ends - step.starts) * (layer + 1) / num_layers)
            hook(step.plan, layer)

    def _wait(self, until: float) -> None:
        seconds = until - self._clock()
        if seconds > 0:
            self._sleep(seconds)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed:
            self._table_lens[row] = 0
            self._draws.free(row)
        for init in plan.admitted:
            self._admit(init)
        for row, block_ids in plan.new_blocks:
            start = self._table_lens[row]
            stop = start + len(block_ids)
            self._tables[row, start:stop] = block_ids
            self._table_lens[row] = stop

    def _admit(self, init: RowInit) -> None:
        row = init.row
        self._table_lens[row] = 0
        self._prompts[row] = init.token_ids.astype(np.uint64)
        self._num_known[row] = len(init.token_ids)
        self._salts[row] = 0 if self.adapters is None else self.adapters.salts[init.adapter_slot]
        self._draws.admit(row, init)

    def _compute(self, step: _Launched) -> StepResult:
        plan = step.plan
        self._read_admitted(plan)
        self._prefill(plan)
        counts, masks = plan.samples.astype(np.int32), step.masks
        if len(step.undrawn):
            masks = self._decode_but_undrawn(step, counts)
        else:
            self._decode(plan.rows[: plan.num_decodes])
        indices = np.flatnonzero(counts)
        tokens, logprobs, bits = self._draw(plan.rows[indices], masks)
        result = StepResult(plan.step, tokens, counts, logprobs)
        if self.max_step_tokens > 1:
            self._decode_further(step, indices, bits, result)
        result.prompt_logprobs = self._draws.prompt_logprobs(plan, self._prompts)
        return result

    def _decode_but_undrawn(self, step: _Launched, counts: Int32) -> TokenMasks | None:
        """Decodes, and takes back what `draw` left out. Returns the masks of the other rows."""
        plan = step.plan
        left_out = np.flatnonzero(plan.samples)[step.undrawn]
        digests = self._digests[plan.rows[left_out]]
        self._decode(plan.rows[: plan.num_decodes])
        # Their last tokens will be computed again, but their KV is kept.
        counts[left_out] = 0
        self._digests[plan.rows[left_out]] = digests
        self._num_computed[plan.rows[left_out]] -= left_out < plan.num_decodes
        return None if step.masks is None else step.masks.among(counts[plan.samples] > 0)

    def _more_tokens(self, step: _Launched, decodes: Int64, bits: UInt64, result: StepResult) -> Int64:
        """Returns how many tokens these decodes get beside the first, by their `bits`. Records their drafts."""
        plan = step.plan
        if self._drafts is None or step.drafted is None:
            return (bits % plan.num_scheduled_tokens[decodes].astype(np.uint64)).astype(np.int64)
        accepted = np.zeros_like(step.drafted)
        accepted[decodes] = self._drafts.accepted(step.drafted[decodes], mix(bits))
        self._drafts.observe(plan, step.drafted, accepted, step.ends - step.starts)
        if step.drafted.any():
            result.drafted = step.drafted.astype(np.int32)
        return accepted[decodes]

    def _decode_further(self, step: _Launched, indices: Int64, bits: UInt64, result: StepResult) -> None:
        """Decodes more tokens of the plan's rows at `indices`: as many as their `bits` give."""
        plan, counts = step.plan, result.counts
        decodes = indices[indices < plan.num_decodes]
        counts[decodes] += self._more_tokens(step, decodes, bits[: len(decodes)], result).astype(np.int32)
        firsts = np.cumsum(counts) - counts  # index of each row's first token
        token_ids = np.empty(counts.sum(), np.int32)
        token_ids[firsts[indices]] = result.token_ids
        result.logprobs = {int(firsts[indices[index]]): entry for index, entry in result.logprobs.items()}
        for offset in range(1, counts.max(initial=0)):
            several = np.flatnonzero(counts[: plan.num_decodes] > offset)
            self._decode(plan.rows[several])
            tokens, logprobs, _ = self._draw(plan.rows[several])
            token_ids[firsts[several] + offset] = tokens
            result.logprobs.update((int(firsts[several[index]]) + offset, entry) for index, entry in logprobs.items())
        result.token_ids = token_ids

    def _read_admitted(self, plan: StepPlan) -> None:
        """Computes the digests of admitted rows from their cached blocks."""
        admitted = {init.row for init in plan.admitted}
        for row, start in zip(plan.rows.tolist(), plan.num_computed_tokens.tolist(), strict=True) if admitted else ():
            if row in admitted:
                self._num_computed[row] = start
                self._digests[row] = self._kv.digest(self._tables[row], start)

    def _prefill(self, plan: StepPlan) -> None:
        for index in range(plan.num_decodes, len(plan.rows)):
            row, start = int(plan.rows[index]), int(plan.num_computed_tokens[index])
            chunk = self._prompts[row][start : start + int(plan.num_scheduled_tokens[index])]
            with np.errstate(over="ignore"):
                self._digests[row] += self._kv.prefill(self._tables[row], start, chunk + self._salts[row])
            self._num_computed[row] = start + len(chunk)

    def _decode(self, rows: Int64) -> None:
        """Computes the KV of each row's next token, which is a known one or the last drawn one."""
        if not len(rows):
            return
        positions = self._num_computed[rows]
        for index in np.flatnonzero(positions < self._num_known[rows]).tolist():
            self._last_tokens[rows[index]] = self._prompts[rows[index]][positions[index]]
        token_ids = self._last_tokens[rows] + self._salts[rows]
        self._digests[rows] += self._kv.decode(self._tables, rows, positions, token_ids)
        self._num_computed[rows] += 1

    def _draw(self, rows: Int64, masks: TokenMasks | None = None) -> tuple[Int32, dict[int, TokenLogprobs], UInt64]:
        """Returns the next token of each row, and the bits that it was drawn from."""
        positions = self._num_computed[rows]
        bits = mix(self._digests[rows] ^ self._kv.probe(self._tables, rows, positions - 1))
        token_ids, logprobs = self._draws.draw(rows, positions, bits, masks)
        self._last_tokens[rows] = token_ids.astype(np.uint64)
        return token_ids, logprobs, bits


def _adapters(settings: SimSettings) -> SimAdapters | None:
    if not settings.max_loras:
        return None
    factor = settings.speed.factor
    return SimAdapters(
        settings.max_loras, factor * settings.adapter_read_seconds, factor * settings.adapter_write_seconds
    )
