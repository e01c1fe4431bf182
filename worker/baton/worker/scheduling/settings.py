"""The batch, budget and queue limits of an engine. Knows no flags."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of one engine, with every value resolved."""

    max_num_requests: int = 256  # rows of the running batch
    max_num_batched_tokens: int = 8192  # tokens of one step, prefill chunks and decodes together
    max_background_prefill_tokens: int = 64  # of one step, of priorities above 0, beside urgent requests; 0: no limit
    max_shared_prefill_tokens: int = 256  # of one step, prompts', while several tenants use the engine; 0: no limit
    long_prefill_token_threshold: int = 0  # tokens of one prompt in a step; longer ones are long; 0: no limit
    max_num_partial_prefills: int = 0  # prompts that are partly computed at a time; 0: no limit
    max_long_partial_prefills: int = 0  # long prompts among them; 0: no limit
    max_queue_depth: int = 1024  # waiting requests; more are refused with NoCapacity
    min_remote_prefill_tokens: int = 64  # with fewer uncached tokens, a prompt is always computed here
    min_host_hit_tokens: int = 256  # shorter hits are computed until measurements decide; 0: no hit is too short
    min_host_uses: int = 1  # requests that have had a block before it is copied to host memory
    host_eviction_policy: str = "lru"  # a key of baton.worker.kv.host_tier.eviction.table.POLICIES
    prefix_caching: bool = True
    # Blocks from one state of a prompt that is kept to the next; 0: those of 2048 tokens, and at least a state's.
    state_snapshot_blocks: int = 0
    state_cache_share: float = 0.8  # part of the blocks that states may have which no request holds
    dummy_kv: bool = False  # prompts are not computed: their KV is what the blocks contain
    cache_outputs: bool = True  # makes blocks of generated tokens findable, too
    block_origins: bool = False  # records the tokens of blocks that become findable, for take_origins
    residency_sample: float = 0.0  # part of the cached blocks whose times are measured; 0: none
    stall_seconds: float = 0.25  # the shortest limit of a step, after which its device counts as stalled; 0: no limit

    def validate(self) -> None:
        """Raises InvalidRequest for limits that contradict each other."""
        least = {
            "max_num_requests": 1,
            "max_num_batched_tokens": 1,
            "max_background_prefill_tokens": 0,
            "max_shared_prefill_tokens": 0,
            "long_prefill_token_threshold": 0,
            "max_num_partial_prefills": 0,
            "max_long_partial_prefills": 0,
            "max_queue_depth": 0,
            "min_remote_prefill_tokens": 0,
            "min_host_hit_tokens": 0,
            "min_host_uses": 1,
            "state_snapshot_blocks": 0,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value < minimum:
                raise InvalidRequest(f"{name} is {value}; it must be at least {minimum}", field=name)
        if self.max_num_batched_tokens < self.max_num_requests:
            raise InvalidRequest(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, max_num_requests is "
                f"{self.max_num_requests}: a step must hold one token of every request",
                field="max_num_batched_tokens",
            )
        if not 0 <= self.state_cache_share <= 1:
            raise InvalidRequest(
                f"state_cache_share is {self.state_cache_share:g}; it must be from 0 to 1", field="state_cache_share"
            )
        if self.dummy_kv and self.prefix_caching:
            raise InvalidRequest(
                "dummy_kv=true needs prefix_caching=false: KV that was not computed must not be found again",
                field="dummy_kv",
            )
        self._check_long_prompts()

    def _check_long_prompts(self) -> None:
        most, most_long = self.max_num_partial_prefills, self.max_long_partial_prefills
        if most and most_long > most:
            raise InvalidRequest(
                f"max_long_partial_prefills is {most_long}; it must be at most max_num_partial_prefills, {most}",
                field="max_long_partial_prefills",
            )
        if most_long and most < 2 and not self.long_prefill_token_threshold:
            raise InvalidRequest(
                f"max_long_partial_prefills is {most_long}, and no prompt is long: set long_prefill_token_threshold, or"
                " max_num_partial_prefills above 1",
                field="max_long_partial_prefills",
            )
