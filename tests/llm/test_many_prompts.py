"""Many prompts: read as the engine needs them, returned in order, with little held at a time; errors end the rest."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

import pytest

from baton.llm import SamplingParams
from baton.llm.batch import Batch
from baton.llm.loop_thread import LoopThread
from baton.llm.progress import Progress, TextBar
from baton.llm.requests.prepared import Work
from baton.llm.requests.prompts import Prompt
from baton.rpc.errors import InvalidRequest

SHORT = SamplingParams(temperature=0, max_tokens=4)
WINDOW = 16  # twice the batch of the fixture's engine


class Counted:
    """Prompts without an end, and how many were read."""

    def __init__(self, most=None):
        self.num_read = 0
        self.most = most

    def __iter__(self):
        for number in itertools.count():
            if number == self.most:
                return
            self.num_read += 1
            yield f"There were {number} dogs"


def test_an_iterable_is_read_as_outputs_are_taken(llm):
    prompts = Counted()
    outputs = llm.generate_iter(prompts, SHORT)
    assert prompts.num_read == 0
    for number, output in enumerate(itertools.islice(outputs, 40)):
        assert output.prompt == f"There were {number} dogs"
        assert prompts.num_read <= number + 1 + WINDOW
    outputs.close()
    assert llm.generate("still here", SHORT, use_tqdm=False)[0].finished


def test_the_batch_stays_full_while_outputs_are_taken(llm):
    prompts = Counted(200)
    before = llm.get_stats().counters.num_steps
    outputs = list(llm.generate_iter(prompts, SHORT))
    steps = llm.get_stats().counters.num_steps - before
    assert [output.prompt for output in outputs] == [f"There were {number} dogs" for number in range(200)]
    # 200 outputs of 4 tokens in a batch of 8 are at least 100 steps; prompts share steps with decodes.
    assert steps <= 140


def test_outputs_may_be_taken_as_they_are_complete(llm):
    lengths = [40, *[2] * 20]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    prompts = [f"There were {number} dogs" for number in range(21)]
    found = [output.prompt for output in llm.generate_iter(prompts, params, in_order=False)]
    assert sorted(found) == sorted(prompts)
    assert found[0] != prompts[0]
    assert [output.prompt for output in llm.generate_iter(prompts, params)] == prompts


def test_a_failing_iterable_raises_its_own_error(llm):
    def prompts():
        yield "a"
        raise OSError("the file has ended")

    with pytest.raises(OSError, match="the file has ended"):
        llm.generate(prompts(), SHORT, use_tqdm=False)
    assert llm.generate("still here", SHORT, use_tqdm=False)[0].finished


def test_a_wrong_prompt_ends_the_others_and_frees_their_blocks(llm):
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    prompts = [*["Once"] * 6, "b " * 600]
    with pytest.raises(InvalidRequest, match=r"prompts\[6\]"):
        llm.generate(prompts, long, use_tqdm=False)
    llm.generate("now", SHORT, use_tqdm=False)
    stats = llm.get_stats(audit=True)
    assert (stats.num_held_blocks, stats.state.load.num_running) == (0, 0)


def test_nothing_is_asked_of_an_empty_list(llm):
    assert llm.generate([], SHORT, use_tqdm=False) == []
    assert list(llm.generate_iter(iter(()), SHORT)) == []


def test_a_request_may_have_more_outputs_than_the_window(llm):
    params = SamplingParams(n=3 * WINDOW, max_tokens=2, temperature=1)
    first, second = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(first.outputs), len(second.outputs)] == [3 * WINDOW] * 2


def test_requests_that_end_together_wake_the_caller_once():
    class Ended:
        error = None

        def snapshot(self):
            return "output"

    waiting = []

    async def start(engine, work, encoded, on_end):
        waiting.append(on_end)
        if len(waiting) == 8:
            for end in waiting:
                end(Ended())
            waiting.clear()
        return Ended(), SimpleNamespace(abort=lambda: None)

    calls = []
    thread = LoopThread("test")
    counted = SimpleNamespace(call=lambda *of: calls.append(of) or thread.call(*of))
    info = SimpleNamespace(max_model_len=8)
    engine = SimpleNamespace(
        arguments=SimpleNamespace(config=SimpleNamespace(max_num_requests=4)),
        model=SimpleNamespace(require_info=lambda: info),
    )
    prompt, prepared = Prompt(token_ids=[5]), SimpleNamespace(n=1)
    works = [Work(number, str(number), number, prompt, prepared) for number in range(24)]
    found = [work.index for work, _ in Batch(counted, engine, start).run(works)]
    thread.close()
    assert found == list(range(24))
    assert len(calls) == 24 // 8 + 1, "one for each eight, and one at the end"


def test_a_bar_of_tqdms_kind_is_driven(llm):
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.count, self.closed, self.postfix = options, 0, False, ""
            bars.append(self)

        def update(self, n=1):
            self.count += n

        def set_postfix_str(self, s):
            self.postfix = s

        def close(self):
            self.closed = True

    llm.generate(["a", "b", "c"], SHORT, use_tqdm=Bar)
    (bar,) = bars
    assert (bar.options["total"], bar.count, bar.closed) == (3, 3, True)
    assert "toks/s" in bar.postfix


def test_the_own_bar_ends_in_one_line_outside_a_terminal(llm, capsys):
    llm.generate(["a", "b"], SHORT)
    written = capsys.readouterr().err
    assert written.startswith("Processed prompts: 100%|####################| 2/2 [00:0")
    assert written.count("\n") == 1
    llm.generate(["a", "b"], SHORT, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal_is_overwritten():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    file = Terminal()
    bar = TextBar(None, "Prompts", file)
    for _ in range(3):
        bar.update()
    bar.close()
    assert "\rPrompts: 1 [" in file.getvalue()
    assert file.getvalue().endswith("\n")
    Progress(False, None).close()


def test_texts_of_all_lengths_are_encoded_as_alone(llm):
    tokenizer = llm.get_tokenizer()
    texts = ["The cat", "", "A dog. " * 40, "The big " + "red " * 90, "One more"]
    prompts = [*texts[:1], *texts[2:], {"prompt": "The cat", "cache_salt": "other"}, [5, 6, 7]]
    found = llm.generate(prompts, SHORT, use_tqdm=False)
    expected = [*(tokenizer.encode(text) for text in (texts[0], *texts[2:], "The cat")), [5, 6, 7]]
    assert [output.prompt_token_ids for output in found] == expected


def test_a_text_that_cannot_be_encoded_is_named_among_others(llm):
    with pytest.raises(InvalidRequest, match=r"^prompts\[2\]: .*surrogate"):
        llm.generate(["The cat", "A dog", "\ud800", "One more"], SHORT, use_tqdm=False)
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: .*context length"):
        llm.generate(["The cat", "a " * 3000, "One more"], SHORT, use_tqdm=False)
    assert llm.generate("still here", SHORT, use_tqdm=False)[0].finished
