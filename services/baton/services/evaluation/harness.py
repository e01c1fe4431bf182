"""Runs tasks of lm-evaluation-harness with an engine in this process."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.services import extras
from baton.services.evaluation.scoring import windows_of
from baton.services.evaluation.tasks import TASKS, task_of


def run_tasks(
    llm: Any, names: Sequence[str], text: str, folder: str, window: int, limit: int
) -> Mapping[str, Mapping[str, float]]:
    """Returns the metrics of each task. `names`: of TASKS, which are made of the text, and of YAML files in `folder`.

    Raises InvalidRequest for a name that is unknown, and where the harness is not installed.
    """
    harness = _imported("lm_eval")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets = importlib.import_module("datasets")
    manager = _imported("lm_eval.tasks").TaskManager(include_path=folder or None, include_defaults=False)
    known = [*TASKS, *manager.all_tasks]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"tasks={name}: it must be one of {', '.join(known)}", field="tasks")
    tasks = [task_of(one, text, datasets.Dataset.from_list) if one in TASKS else one for one in names]
    found = harness.simple_evaluate(
        _model_of(llm, window), tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return {name: _metrics(values) for name, values in found["results"].items()}


def check_folder(folder: str) -> None:
    """Raises InvalidRequest if there is no such folder of tasks."""
    if folder and not Path(folder).is_dir():
        raise InvalidRequest(f"task_folder={folder}: there is no such folder", field="task_folder")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        line = extras.install_line("eval")
        raise InvalidRequest(f"tasks: the package {error.name} is not installed; {line}", field="tasks") from error


def _metrics(values: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns the metrics without their filters' names and errors."""
    return {
        key.partition(",")[0]: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and "stderr" not in key and "," in key
    }


def _model_of(llm: Any, window: int) -> Any:
    """Returns the engine as the harness sees a model. Texts keep their last `window` tokens."""
    base = _imported("lm_eval.api.model").TemplateLM
    params = importlib.import_module("baton.llm").SamplingParams
    tokenizer = llm.get_tokenizer()

    def logprobs_of(prompts: Sequence[list[int]]) -> list[list[Any]]:
        wanted = params(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], wanted, use_tqdm=False)
        return [
            [entries[token] for token, entries in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    class EngineModel(base):  # type: ignore[misc, valid-type]
        @property
        def eot_token_id(self) -> int:
            # Only the beginning of texts without a context needs it, which a tokenizer marks or not.
            return next(iter(tokenizer.encode("")), 0)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids: list[int] = tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)
            return ids

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            each = logprobs_of([(context + continuation)[-window:] for _, context, continuation in requests])
            scored = [found[-len(request[2]) :] for request, found in zip(requests, each, strict=True)]
            return [(sum(one.logprob for one in found), all(one.rank == 1 for one in found)) for found in scored]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            texts = [windows_of(self.tok_encode(request.args[0]), window) for request in requests]
            return [sum(one.logprob for found in logprobs_of(pieces) for one in found) for pieces in texts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            prompts, wanted = [], []
            for context, options in (request.args for request in requests):
                most = int(options.get("max_gen_toks", 256))
                prompts.append({"prompt_token_ids": self.tok_encode(context)[-max(1, window - most) :]})
                until = options.get("until") or []
                stop = [until] if isinstance(until, str) else list(until)
                wanted.append(params(temperature=float(options.get("temperature", 0)), max_tokens=most, stop=stop))
            outputs = llm.generate(prompts, wanted, use_tqdm=False) if prompts else []
            return [output.outputs[0].text for output in outputs]

    return EngineModel()
