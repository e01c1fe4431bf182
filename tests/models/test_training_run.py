"""A training from end to end with a tiny network, and the parts that choose its result."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train.__main__ import main
from train.chats.chat import Tokens, encode
from train.chats.long import agent_document, make_parts
from train.chats.pools import Pools
from train.chats.short import short_document
from train.measures.evaluation import Score, perplexities
from train.measures.exam import Marks, choose
from train.networks.averages import Average, blended, copied
from train.networks.network import Kernels, Network, load, read_shape, save
from train.options import parse
from train.packing import make_row
from train.training import Losses, Plan, check_compiles, compiled_losses, story_loss, train

MODEL = Path(__file__).resolve().parents[2] / "models" / "storyteller-7m"
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
IM_END = 4
STORY = ("Tell me a story.", "Once upon a time, there was a dog named Rex. He was happy.")


def make_model(folder: Path, seed: int) -> Path:
    """A network of random weights that ends its texts after some tens of tokens."""
    folder.mkdir()
    config = json.loads((MODEL / "config.json").read_text()) | SIZES | HEADS
    config["layer_types"] = ["sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(MODEL / "tokenizer.json", folder)
    generator = torch.Generator().manual_seed(seed)
    network = Network(read_shape(folder), Kernels())
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.05, generator=generator)
        # Every token has the same first number, so that a greater one makes the end likely after any token.
        network.embed[:, 0] = 0.5
        network.embed[IM_END, 0] = 1.25
    save(network, folder / "model.safetensors")
    return folder


@pytest.fixture
def models(tmp_path):
    return make_model(tmp_path / "before", 1), make_model(tmp_path / "start", 2)


def loaded(folder: Path) -> Network:
    return load(folder, read_shape(folder), Kernels())


@pytest.fixture
def one_thread():
    """Threads cost a tiny network more than they save."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("one_thread")
def test_a_training_writes_a_model_and_figures_of_all_three(models, tmp_path, capsys):
    before, start = models
    out = tmp_path / "out"
    amounts = "--minutes 5 --stories 48 --chats 60 --agents 2 --held-out 6 --exam 2 --length 2048 --steps 3 --peak 0.01"
    main(["--before", str(before), "--start", str(start), "--out", str(out), *amounts.split()])
    report = json.loads((out / "report.json").read_text())
    names = list(report["earlier"])
    assert list(report["start"]) == list(report["after"]) == names
    assert {"perplexity, sampled as served", "both nouns used", "name from the start of 2048"} <= set(names)
    assert report["chosen"] in report["candidates"]
    assert {"start", "average at the end", "last step"} < set(report["candidates"])
    printed = capsys.readouterr().out
    assert "| | earlier | start | after |" in printed
    assert "3 steps in" in printed
    saved, first = load_file(out / "model.safetensors"), load_file(start / "model.safetensors")
    assert saved.keys() == first.keys()
    # The teacher's texts are read better: three steps at this rate change much.
    assert report["after"]["perplexity, sampled as trained"] < report["start"]["perplexity, sampled as trained"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--length", "1024", "argument --length: 1024 tokens; allowed are multiples of 128 from 2048 on"),
        ("--length", "2100", "argument --length: 2100 tokens"),
        ("--minutes", "0", "argument --minutes: 0; it must be above 0"),
        ("--start", "nowhere", "argument --start: nowhere lacks config.json, tokenizer.json, model.safetensors"),
    ],
)
def test_wrong_options_are_refused_by_name(models, capsys, option, value, message):
    right = {"--before": str(models[0]), "--start": str(models[1]), "--out": "out", option: value}
    with pytest.raises(SystemExit):
        parse([text for pair in right.items() for text in pair], None)
    assert message in capsys.readouterr().err


def test_a_blend_lies_between_and_a_copy_is_not_trained(models):
    one, other = map(loaded, models)
    blend = blended(one, other, 0.25)
    for made, first, second in zip(blend.parameters(), one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(made, 0.75 * first + 0.25 * second, atol=1e-6)
        assert not made.requires_grad
    copy = copied(one)
    with torch.no_grad():
        one.embed.zero_()
    assert copy.embed.abs().sum() > 0


def test_an_average_follows_the_weights_and_lags_behind(models):
    network = loaded(models[0])
    average = Average(network, 0.9)
    with torch.no_grad():
        network.embed.fill_(1.0)
    distances = []
    for _ in range(60):
        average.update(network)
        distances.append(float((average.network.embed - 1.0).abs().max()))
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.05
    assert distances[-1] < 0.01


@pytest.mark.usefixtures("one_thread")
def test_a_training_keeps_averages_and_a_snapshot_on_its_way(models, tmp_path, monkeypatch):
    """By a clock that goes on by a second each time it is read."""
    monkeypatch.setattr("train.training.time", SimpleNamespace(monotonic=itertools.count().__next__))
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rng = Random(1)
    short = encode(tokenizer, [short_document(rng, STORY) for _ in range(20)])
    agents = encode(tokenizer, [agent_document(rng, STORY)])
    pools = Pools(short, agents, make_parts(rng, tokenizer, [STORY] * 5, 200, 20))
    network, teacher = loaded(models[1]), loaded(models[0]).requires_grad_(False)
    plan = Plan(60.0, 2048, 1e-3, 0, tmp_path, 1, 5.0, 0.8, snapshot_seconds=15.0)
    candidates = train(network, teacher, [tokens_of(list(range(5, 105)))] * 9, pools, plan, Losses())
    kept = ["average at 70%", "average at 80%", "average at 90%", "average at the end", "last step"]
    assert list(candidates) == kept
    sums = [float(one.embed.double().sum()) for one in candidates.values()]
    assert len(set(sums)) == len(kept)
    assert torch.equal(candidates["last step"].embed, network.embed)
    snapshot = load_file(tmp_path / "snapshot.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(snapshot, candidates["average at the end"].embed.bfloat16())


def marks(perplexity: float, right: int) -> Marks:
    return Marks({"stories": perplexity}, {"json": Score(right, 100), "tools": Score(50, 100)})


def test_the_best_stories_are_chosen_among_those_that_lost_no_skill():
    candidates = {"start": marks(2.0, 90), "forgot": marks(1.5, 60), "kept": marks(1.8, 88), "slower": marks(1.9, 95)}
    assert candidates["forgot"].lost(candidates["start"]) == ["json"]
    assert choose(candidates, "start") == "kept"
    assert choose({"start": marks(2.0, 90), "forgot": marks(1.5, 60)}, "start") == "start"


def test_a_difference_within_chance_is_no_loss():
    assert not Score(85, 100).is_below(Score(90, 100))
    assert Score(850, 1000).is_below(Score(900, 1000))
    assert not Score(0, 10).is_below(Score(0, 10))
    assert not Score(10, 10).is_below(Score(0, 10))


def test_perplexity_at_a_temperature_is_that_of_scaled_logits(models):
    network = loaded(models[0])
    documents = [tokens_of([1, 20, 30, 40, 4])]
    found = perplexities(network, documents, 2048, (1.0, 0.5))
    with torch.no_grad():
        network.norm *= 2.0
    assert found[0.5] == pytest.approx(perplexities(network, documents, 2048, (1.0,))[1.0], rel=1e-4)
    assert found[0.5] != pytest.approx(found[1.0], rel=1e-3)


def tokens_of(ids):
    return Tokens(np.array(ids, np.uint16), np.arange(len(ids)) > 0)


def test_the_story_loss_is_zero_where_the_network_is_the_teacher_at_that_temperature():
    torch.manual_seed(0)
    x, norm, embed = torch.randn(8, 16), torch.ones(16), torch.randn(40, 16)
    weights = torch.ones(8)
    sharper = norm / 0.8
    assert story_loss(x, sharper, embed, x, norm, embed, weights, 1e-5, 0.8) == pytest.approx(0.0, abs=1e-5)
    assert story_loss(x, norm, embed, x, norm, embed, weights, 1e-5, 0.8) > 0.01


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch warns of its own calls while it compiles
def test_compiled_losses_are_the_plain_ones(models, tmp_path):
    network, teacher = map(loaded, models)
    teacher.requires_grad_(False)
    plan = Plan(1.0, 512, 1e-3, 0, tmp_path, 1, 5.0, 0.8)
    made = []
    for losses in (Losses(), compiled_losses()):
        torch.manual_seed(0)
        check_compiles(network, teacher, plan, losses)
        row = make_row([tokens_of(list(range(5, 400)))], 512)
        x = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
        arguments = (x, network.norm, network.embed, row.targets, row.weights, 1e-5)
        made.append(losses.skill(*arguments).item())
    assert made[0] == pytest.approx(made[1], rel=1e-4)
    assert network.embed.grad is None
