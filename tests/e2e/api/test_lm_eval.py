"""lm-evaluation-harness, unchanged, against real services: log-likelihoods and generations of tasks on local files."""

import json
import math
import os
import subprocess
import sys

import pytest
from support.processes.stack import MODEL, MODEL_NAME

STORY = "Once upon a time there was a little dog"
CHOICES = [" who liked to play.", " zxq kkv 77 zzz."]

TASKS = {
    "stories_choice": """
task: stories_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{story}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "stories_text": """
task: stories_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "{{story}}"
doc_to_target: "{{story}}"
generation_kwargs: {until: ["."], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}

# The harness's own tasks, of which there are thousands, are not read.
PROGRAM = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

folder, model_args, *tasks = sys.argv[1:]
manager = TaskManager(include_path=folder, include_defaults=False)
found = simple_evaluate("local-completions", json.loads(model_args), tasks, task_manager=manager, log_samples=True)
with open(f"{folder}/samples.json", "w") as file:
    json.dump(found["samples"], file, default=str)
"""


@pytest.fixture(scope="module")
def samples(tandem_stack, tmp_path_factory):
    """What the harness wrote down of every request, by task."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = folder / "stories.jsonl"
    rows = [{"story": f"{STORY}{more}", "choices": CHOICES, "gold": 0} for more in ("", " and a cat", " named Tom")]
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    model_args = {
        "model": MODEL_NAME,
        "base_url": f"{tandem_stack.url}/v1/completions",
        "tokenizer": str(MODEL),
        "num_concurrent": 2,
        "max_retries": 1,
        "tokenized_requests": True,
    }
    words = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(model_args), *TASKS]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(words, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "samples.json").read_text())


@pytest.mark.timeout(400)
def test_the_models_own_text_is_likelier_than_noise(samples):
    answers = samples["stories_choice"]
    assert len(answers) == 3
    for answer in answers:
        (sense, _), (noise, _) = (pair[0] if isinstance(pair[0], list) else pair for pair in answer["filtered_resps"])
        assert -200 < float(sense) < 0
        assert float(noise) < float(sense)
        assert math.isfinite(float(noise))
        assert answer["acc"] == 1.0


def test_generations_stop_at_the_tasks_stop_strings(samples):
    for answer in samples["stories_text"]:
        (text,) = answer["filtered_resps"]
        assert "." not in text, answer
    assert any(answer["filtered_resps"][0].strip() for answer in samples["stories_text"]), samples["stories_text"]
