"""The worker's first settings: its addresses, its model, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.plugins import kinds
from baton.rpc.tls import settings as tls_settings

# Of quantization/formats/table.py, which is above the settings.
WEIGHT_FORMATS = (
    "fp8",
    "compressed-tensors",
    "awq",
    "gptq",
    "mxfp4",
    "bitsandbytes",
    "gguf",
    "modelopt",
    "fbgemm_fp8",
    "auto-round",
)
_EIGHT_BITS = "give fp8_e4m3, which has the same size"
# vLLM's names that have no kernels here, and what to give instead.
OTHER_KV_DTYPES: Mapping[str, str] = {
    "bfloat16": "KV has the dtype of --dtype; give auto",
    "float16": "KV has the dtype of --dtype; give auto",
    "fp8_e5m2": f"{_EIGHT_BITS} and more precision",
    "fp8_inc": f"it is for Gaudi; {_EIGHT_BITS}",
    "fp8_ds_mla": "it is for models with latent attention; give auto",
    "int8_per_token_head": _EIGHT_BITS,
    "fp8_per_token_head": f"{_EIGHT_BITS}, with a scale for each layer",
    "int4_per_token_head": "give fp8_e4m3, the smallest that there is",
    "nvfp4": "give fp8_e4m3, the smallest that there is",
}


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of a worker's addresses, model and memory."""

    worker_id: str = field(default="", metadata={"help": "Name in the fleet. Empty: made from host and port."})
    role: str = field(
        default="both",
        metadata={"help": "What this worker computes for others.", "choices": ("prefill", "decode", "both")},
    )
    listen: str = field(default="127.0.0.1:8100", metadata={"help": "gRPC address.", "metavar": "HOST:PORT"})
    advertise: str = field(
        default="",
        metadata={"help": "Host that other services reach this worker at. Empty: the listen host.", "metavar": "HOST"},
    )
    metrics_listen: str = field(
        default="", metadata={"help": "Prometheus address. Empty: off.", "metavar": "HOST:PORT"}
    )
    plugins: tuple[str, ...] = field(default=(), metadata=kinds.SETTING)
    tls_certificate: str = field(default="", metadata=tls_settings.CERTIFICATE)
    tls_key: str = field(default="", metadata=tls_settings.KEY)
    tls_ca: str = field(default="", metadata=tls_settings.CA)
    metrics_plain: bool = field(default=False, metadata=tls_settings.METRICS_PLAIN)
    kv_plain: bool = field(
        default=False,
        metadata={
            "help": "With --tls-certificate: allow KV over nccl, rdma and plugins that encrypt nothing, for private "
            "networks. Without it, KV moves over tcp with TLS, and within a host over ipc."
        },
    )
    transfer_listen: str = field(
        default="",
        metadata={
            "help": "Address that receives KV of other workers. Empty: the listen host, any free port.",
            "metavar": "HOST:PORT",
        },
    )
    transports: str = field(
        default="auto",
        metadata={
            "help": "What KV may move over, best first: some of ipc,nccl,rdma,tcp and plugins. auto: all that there "
            "is. none: no KV moves to or from this worker.",
            "metavar": "NAMES",
        },
    )
    kvstore: str = field(
        default="",
        metadata={
            "help": "The kvstore to publish KV events to, several replicas with commas. Empty: none.",
            "metavar": "HOST:PORT,..",
        },
    )

    speculative_config: str = field(
        default="",
        metadata={
            "help": "Guess tokens and verify several in a step, as a JSON object with vLLM's keys: method (ngram, "
            "suffix, draft_model, eagle3, mtp, a plugin), model, num_speculative_tokens and more. Changes no "
            "token, and computes them as batch_invariant does; executor=cpu or cuda. Empty: off.",
            "metavar": "JSON",
        },
    )
    kv_events_config: str = field(
        default="",
        metadata={
            "help": "Publish the cache's changes over ZeroMQ, in vLLM's format and with its keys: endpoint, "
            "replay_endpoint, topic and more. Empty: not.",
            "metavar": "JSON",
        },
    )

    model: str = field(
        default="models/storyteller-7m",
        metadata={"help": "Folder in Hugging Face form, or a GGUF file.", "metavar": "PATH"},
    )
    revision: str = field(
        default="",
        metadata={"help": "Branch, tag or commit of a hub id. Empty: its main branch.", "metavar": "NAME"},
    )
    hf_overrides: str = field(
        default="",
        metadata={
            "help": "Values that replace those of config.json, nested as they are there. Empty: none.",
            "metavar": "JSON",
        },
    )
    served_model_name: str = field(default="", metadata={"help": "Name clients use. Empty: the model folder's name."})
    load_format: str = field(
        default="auto",
        metadata={"help": "Source of the weights; dummy: random weights.", "choices": ("auto", "safetensors", "dummy")},
    )
    quantization: str = field(
        default="auto",
        metadata={
            "help": "Weight format: auto or the checkpoint's own, as it is; fp8 is also made of unquantized weights "
            "while they load, with a scale a row.",
            "choices": ("auto", *WEIGHT_FORMATS),
            "words": {"awq_marlin": "awq", "gptq_marlin": "gptq", "ptpc_fp8": "fp8"},
        },
    )
    model_impl: str = field(
        default="auto",
        metadata={
            "help": "What computes the layers: baton, a family of ours; transformers, the installed Transformers over "
            "Baton's KV cache; auto: a family if there is one.",
            "choices": ("auto", "baton", "transformers"),
        },
    )
    convert: str = field(
        default="auto",
        metadata={
            "help": "What the model makes of a text. embed: embeddings; classify: scores of classes; none: tokens; "
            "auto: what its architecture and its modules.json say.",
            "choices": ("auto", "none", "embed", "classify"),
        },
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Of weights and KV; auto: what suits the device.",
            "choices": ("auto", "float32", "bfloat16", "float16"),
        },
    )
    executor: str = field(
        default="cpu",
        metadata={"help": "What computes steps; sim: a clock, no tensors.", "choices": ("cpu", "cuda", "sim")},
    )
    threads: int = field(default=0, metadata={"help": "Compute threads. 0: one a core.", "minimum": 0, "maximum": 1024})

    tensor_parallel_size: int = field(
        default=1,
        metadata={
            "help": "GPUs that a worker's model is spread over. This version computes on one.",
            "minimum": 1,
            "maximum": 1,
        },
    )
    block_size: int = field(default=16, metadata={"help": "Tokens a KV block.", "minimum": 1, "maximum": 1024})
    num_blocks: int = field(
        default=0, metadata={"help": "KV blocks. 0: from --kv-cache-memory.", "minimum": 0, "maximum": 2**31 - 1}
    )
    kv_cache_memory: int = field(
        default=0,
        metadata={"help": "Bytes for KV. 0: a tenth of this machine's memory, at most 4 GiB.", "minimum": 0},
    )
    host_cache_gb: float = field(
        default=0.0,
        metadata={
            "help": "GB of host memory for KV blocks that the device evicts; 10^9 bytes each. 0: none.",
            "minimum": 0.0,
            "maximum": 65536.0,
        },
    )
    state_snapshot_blocks: int = field(
        default=0,
        metadata={
            "help": "Blocks of a prompt from one kept state of recurrent layers to the next. 0: those of 2048 "
            "tokens or of a step, and at least as many as a state takes.",
            "minimum": 0,
        },
    )
    state_cache_share: float = field(
        default=0.8,
        metadata={
            "help": "Part of the KV blocks that kept states of recurrent layers take at most.",
            "minimum": 0.0,
            "maximum": 1.0,
        },
    )
    host_cache_min_uses: int = field(
        default=1,
        metadata={
            "help": "Requests that must have had a block before it is copied to host memory. 1: every evicted block.",
            "minimum": 1,
            "maximum": 1000,
        },
    )
    host_cache_eviction_policy: str = field(
        default="lru",
        metadata={
            "help": "Which blocks leave host memory first; lru: the least recently used; arc: adapts, so that texts "
            "that come once do not displace those that return.",
            "choices": ("lru", "arc"),
        },
    )
    disk_cache_dir: str = field(
        default="",
        metadata={
            "help": "A folder of this worker's own for KV blocks of host memory, which are found again after a restart "
            "of the same model. Empty: none.",
            "metavar": "FOLDER",
        },
    )
    disk_cache_gb: float = field(
        default=0.0,
        metadata={
            "help": "GB that the files in --disk-cache-dir take at most; 10^9 bytes each.",
            "minimum": 0.0,
            "maximum": 1048576.0,
        },
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata={
            "help": "Share of the GPU for weights, steps and KV, under executor=cuda without --kv-cache-memory.",
            "minimum": 0.05,
            "maximum": 1.0,
        },
    )
    cuda_graphs: bool = field(default=True, metadata={"help": "Replay decode steps as CUDA graphs."})
    kv_cache_dtype: str = field(
        default="auto",
        metadata={
            "help": "Of KV; auto: as --dtype. fp8_e4m3, also fp8, has 8 bits and scales.",
            "choices": ("auto", "fp8_e4m3"),
            "words": {"fp8": "fp8_e4m3"},
            "refused": OTHER_KV_DTYPES,
        },
    )
    calculate_kv_scales: bool = field(
        default=False,
        metadata={
            "help": "Compute the scales of fp8_e4m3 KV at start, from prompts of random tokens, instead of reading the "
            "checkpoint's."
        },
    )
    batch_invariant: bool = field(
        default=False,
        metadata={
            "help": "Compute each request's tokens bit-identically in every batch. Slower; executor=cpu or cuda."
        },
    )
    logprobs_mode: str = field(
        default="raw_logprobs",
        metadata={
            "help": "What is given as log-probabilities of sampled tokens: the model's (raw), or what tokens are drawn "
            "from, after penalties, masks, temperature and filters (processed); logits are not normalized. Others than "
            "raw_logprobs do not rank beams or best_of. Under executor=cuda, processed values take "
            "max_num_requests * vocab_size * 4 bytes of the GPU.",
            "choices": ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
        },
    )
    compile_cache_dir: str = field(
        default="",
        metadata={
            "help": "Compiled kernels, under executor=cuda. Empty: baton/triton in the user's cache folder.",
            "metavar": "FOLDER",
        },
    )
