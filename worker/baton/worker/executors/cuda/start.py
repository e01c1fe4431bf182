"""Chooses the CUDA executor of a model."""

from __future__ import annotations

from baton.plugins.plugins import NO_PLUGINS, Plugins
from baton.worker.config import WorkerConfig
from baton.worker.executors.base import ServingExecutor
from baton.worker.executors.cuda.compilation.ahead import compilers_of_start
from baton.worker.executors.cuda.startup.memory import open_device
from baton.worker.weights.loading import model_options, read_config


def start_cuda_executor(config: WorkerConfig, plugins: Plugins = NO_PLUGINS) -> ServingExecutor:
    """Returns the executor of the configured model: over a KV cache, or of whole prompts."""
    device = open_device()  # a missing device is reported before a wrong model
    cached = read_config(config.model, config.load_format, model_options(config, plugins)).cached
    with compilers_of_start(device) as compilers:
        if cached:
            from baton.worker.executors.cuda.executor import CudaExecutor

            return CudaExecutor(config, compilers, plugins)
        from baton.worker.executors.cuda.whole_executor import WholeExecutor

        return WholeExecutor(config, compilers, plugins)
