"""Placement policies of other systems, reimplemented from their documentation, for `baton simulate`."""

PEERS = {
    "round_robin": "bench.policies.round_robin:RoundRobin",
    "least_loaded": "bench.policies.least_loaded:LeastLoaded",
    "consistent_hash": "bench.policies.consistent_hash:ConsistentHash",
    "power_of_two": "bench.policies.power_of_two:PowerOfTwo",
    "sglang": "bench.policies.sglang_cache_aware:CacheAware",
    "dynamo": "bench.policies.dynamo_cost:LinearCost",
    "llmd_sticky": "bench.policies.llmd_sticky:StickyUntilSaturated",
    "llmd_blend": "bench.policies.llmd_blend:WeightedBlend",
}
DISAGGREGATION = {
    "always": "bench.policies.thresholds:Always",
    "never": "bench.policies.thresholds:Never",
    "256": "bench.policies.thresholds:Uncached256",
    "2048_and_0.7": "bench.policies.thresholds:Uncached2048AndShare",
}
