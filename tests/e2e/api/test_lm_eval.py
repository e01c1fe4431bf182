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
        "num_concurrent": "2",
        "max_retries": "1",
        "tokenized_requests": "True",
    }
    words = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", ",".join(TASKS)]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())]
    words += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(words, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for name in TASKS:
        (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


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
