"""Offline inference: the gateway's generation over a worker's engine in the same process, without a socket.

    from baton.llm import LLM, SamplingParams

    llm = LLM("models/storyteller-7m")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

Names of classes, arguments and fields are those of vLLM.
"""

from baton.llm.async_llm import AsyncLLM
from baton.llm.engine.engine_args import AsyncEngineArgs, EngineArgs
from baton.llm.engine.trainer.sender import WeightSender
from baton.llm.llm import LLM
from baton.llm.parameters.beam_search_params import BeamSearchParams
from baton.llm.parameters.names import InvalidParameter, UnknownParameter
from baton.llm.parameters.sampling_params import RequestOutputKind, SamplingParams
from baton.llm.parameters.structured_outputs import RepetitionDetectionParams, StructuredOutputsParams
from baton.llm.requests.adapters import LoRARequest
from baton.llm.results.beams import BeamSearchOutput, BeamSearchSequence
from baton.llm.results.metrics import Counter, Gauge, Histogram, Metric
from baton.llm.results.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Counter",
    "EngineArgs",
    "Gauge",
    "Histogram",
    "InvalidParameter",
    "LoRARequest",
    "Logprob",
    "Metric",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "UnknownParameter",
    "WeightSender",
]
