"""Logits processors in an offline engine: the tokens of Transformers with the same change, also after a preemption."""

from __future__ import annotations

import pytest
from support.plugins.packages import install, install_example
from support.plugins.processors import NAMES, expected_tokens, install_processors

from baton.llm import LLM, InvalidParameter, SamplingParams
from baton.plugins.kinds import LOGITS_PROCESSORS
from baton.plugins.plugins import PluginError
from baton.rpc.errors import DataLoss, InvalidRequest

from .conftest import MODEL

PROMPTS = ["Once upon a time", "The big dog", "Lily and her mom went", "One day a cat saw"]
SIZES = {"threads": 1, "max_num_seqs": 8, "max_model_len": 96, "num_blocks": 8}


def greedy(count=24, **arguments):
    return SamplingParams(temperature=0, max_tokens=count, extra_args=arguments or None, ignore_eos=True)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    install_processors(folder)
    install_example(folder, "logits_processors")
    install_example(folder, "endpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def llm(packages):
    with LLM(str(MODEL), plugins=[*NAMES, "forced-prefix"], **SIZES) as one:
        yield one


CASES = [{}, {"no_echo": 12}, {"wave_height": 0.4}, {"no_echo": 5, "wave_height": 0.7}]


def check(outputs, oracle, count):
    for output, arguments in zip(outputs, CASES, strict=True):
        expected = expected_tokens(oracle, output.prompt_token_ids, count, **arguments)
        assert list(output.outputs[0].token_ids) == expected, arguments


def test_tokens_are_those_of_transformers_with_the_same_processors(llm, oracle):
    outputs = llm.generate(PROMPTS, [greedy(**arguments) for arguments in CASES], use_tqdm=False)
    check(outputs, oracle, 24)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_each_processor_changes_the_output(llm):
    outputs = llm.generate([PROMPTS[0]] * 4, [greedy(**arguments) for arguments in CASES], use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_a_preemption_changes_no_token(llm, oracle):
    """Four requests of 60 tokens do not fit into 8 blocks of 16."""
    before = llm.get_stats().counters.num_preemptions
    outputs = llm.generate(PROMPTS, [greedy(60, **arguments) for arguments in CASES], use_tqdm=False)
    assert llm.get_stats().counters.num_preemptions > before
    check(outputs, oracle, 60)


def test_log_probabilities_are_the_models_own(llm):
    both = [greedy(1), greedy(1, wave_height=-50.0)]
    for params in both:
        params.logprobs = 5
    plain, changed = llm.generate([PROMPTS[0]] * 2, both, use_tqdm=False)
    (one,), (other,) = plain.outputs[0].logprobs, changed.outputs[0].logprobs
    assert plain.outputs[0].token_ids != changed.outputs[0].token_ids
    for token_id, logprob in one.items():
        assert other[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-5)


def test_the_example_forces_the_first_tokens(llm):
    wanted = [7, 300, 12]
    (output,) = llm.generate(PROMPTS[0], greedy(6, forced_prefix=wanted), use_tqdm=False)
    assert list(output.outputs[0].token_ids)[:3] == wanted
    continued = llm.generate({"prompt_token_ids": [*output.prompt_token_ids, *wanted]}, greedy(3), use_tqdm=False)
    assert list(output.outputs[0].token_ids)[3:] == list(continued[0].outputs[0].token_ids)


def test_a_failure_ends_its_request_only(llm, oracle):
    params = [greedy(12, fail_after=99), greedy(12, fail_after=4), greedy(12, no_echo=3), greedy(12)]
    with pytest.raises(DataLoss, match=r"the logits processor faulty failed \(RuntimeError\)") as error:
        llm.generate(PROMPTS, params, use_tqdm=False)
    assert "secret" not in str(error.value)
    found = []
    for index, each in enumerate(params):
        try:
            found.append(llm.generate(PROMPTS[index], each, use_tqdm=False)[0])
        except DataLoss:
            found.append(None)
    assert [output is None for output in found] == [False, True, False, False]
    assert list(found[0].outputs[0].token_ids) == [7] * 12


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"no_ekko": 1},
            InvalidRequest,
            r"no logits processor reads vllm_xargs.no_ekko: they read fail_after, forced_p",
        ),
        ({"no_echo": 0}, InvalidRequest, r"vllm_xargs: no-echo refuses {'no_echo': 0}: give a number of tokens"),
        ({"no_echo": "1"}, InvalidRequest, r"no-echo refuses {'no_echo': '1'}"),
        ({"forced_prefix": [4096]}, InvalidRequest, r"forced-prefix refuses .*: give token ids from 0 to 4095"),
        ({"fail_after": "submit"}, DataLoss, r"the logits processor faulty failed \(RuntimeError\)"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused(llm, arguments, error, message):
    with pytest.raises(error, match=message):
        llm.generate(PROMPTS[0], greedy(4, **arguments), use_tqdm=False)


def test_values_are_scalars_or_lists_of_them():
    with pytest.raises(InvalidParameter, match="extra_args"):
        SamplingParams(extra_args={"a": {"b": 1}})
    assert SamplingParams(extra_args={"a": [1, 2.5, "x", True], "b": "y"}).extra_args["b"] == "y"


def test_an_engine_loads_only_what_is_named(packages):
    with pytest.raises(PluginError, match="'nothing' is not installed; installed are faulty, forced-prefix, no-echo"):
        LLM(str(MODEL), plugins=["nothing"], **SIZES)
    with pytest.raises(InvalidParameter, match="'token-counts' is not of a kind for offline use"):
        LLM(str(MODEL), plugins=["token-counts"], **SIZES)
    with pytest.raises(InvalidParameter, match="plugins is 'waves'; give a list of names"):
        LLM(str(MODEL), plugins="waves", **SIZES)
    with (
        LLM(str(MODEL), **SIZES) as llm,
        pytest.raises(InvalidRequest, match=r"vllm_xargs\.waves: this worker has none"),
    ):
        llm.generate(PROMPTS[0], greedy(4, waves=1), use_tqdm=False)


@pytest.mark.parametrize(
    ("source", "raised"),
    [
        ("def __init__(self, context): raise OSError('no licence')", "OSError: no licence"),
        ("pass", "TypeError: its arguments are None; they must be a tuple of names, at least one"),
    ],
)
def test_a_processor_that_raises_at_start_is_named(tmp_path, monkeypatch, source, raised):
    module = f"""
from baton.worker.sampling.processors.interface import LogitsProcessor

class Bad(LogitsProcessor):
    {source}

    def new_row(self, arguments, prompt_token_ids): ...
    def apply(self, logits, rows): ...
"""
    install(tmp_path, f"bad-{len(source)}", module, {LOGITS_PROCESSORS.group: {"bad": "Bad"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidRequest) as error:
        LLM(str(MODEL), plugins=["bad"], **SIZES)
    assert error.value.message.startswith(
        "plugins: 'bad' cannot be started (entry point baton.logits_processors.v1: bad"
    )
    assert error.value.message.endswith(raised)
