"""The training loop: stories by distillation, skills by their own tokens, for a given number of seconds."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from train.chats.chat import Tokens
from train.chats.pools import Pools, shuffled, skills
from train.networks.averages import Average, copied
from train.networks.network import Network, compute_dtype, normed, save
from train.packing import Row, make_row, masks_of, packed

Step = tuple[list[Row], Row]  # rows of stories, and one of skills
_AVERAGE_DECAY = 0.998  # the mean of about 500 steps
_CANDIDATES = (0.7, 0.8, 0.9)  # shares of the training after which the average is kept


@dataclass(frozen=True, slots=True)
class Plan:
    """The length, the learning rate and the rows of a training."""

    seconds: float
    length: int  # tokens of a row
    peak: float  # learning rate
    seed: int
    folder: Path  # of snapshots
    story_rows: int  # a step, beside one row of skills
    story_weight: float  # of the story loss beside the skill loss
    temperature: float  # of the teacher's distribution
    max_steps: int = 1_000_000
    snapshot_seconds: float = 60.0


def story_loss(
    x: Tensor,
    norm: Tensor,
    embed: Tensor,
    teacher_x: Tensor,
    teacher_norm: Tensor,
    teacher_embed: Tensor,
    weights: Tensor,
    eps: float,
    temperature: float,
) -> Tensor:
    """Returns the KL divergence from the teacher's next-token distribution at this temperature, in nats per token."""
    own = _logits(x, norm, embed, eps).log_softmax(-1)
    theirs = (_logits(teacher_x, teacher_norm, teacher_embed, eps) / temperature).log_softmax(-1)
    each = (theirs.exp() * (theirs - own)).sum(-1)
    return (each * weights).sum() / weights.sum().clamp(min=1)


def skill_loss(x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Returns the cross entropy, in nats per token."""
    own = _logits(x, norm, embed, eps).log_softmax(-1)
    each = -own.gather(-1, targets[:, None])[:, 0]
    return (each * weights).sum() / weights.sum().clamp(min=1)


def _logits(x: Tensor, norm: Tensor, embed: Tensor, eps: float) -> Tensor:
    dtype = compute_dtype(x)
    return functional.linear(normed(x, norm, eps).to(dtype), embed.to(dtype)).float()


@dataclass(frozen=True, slots=True)
class Losses:
    """The same functions, compiled or not."""

    story: Callable[..., Tensor] = story_loss
    skill: Callable[..., Tensor] = skill_loss


def compiled_losses() -> Losses:
    """Returns losses that are compiled for the first shape that they meet."""
    return Losses(torch.compile(story_loss, dynamic=False), torch.compile(skill_loss, dynamic=False))


def train(
    network: Network, teacher: Network, stories: list[Tokens], pools: Pools, plan: Plan, losses: Losses
) -> dict[str, Network]:
    """Trains in place; the learning rate follows the clock. Returns the candidates by name."""
    optimizer = _optimizer(network, plan.peak, fused=network.embed.is_cuda)
    average = Average(network, _AVERAGE_DECAY)
    clock = _Clock(plan.seconds)
    rows = _Rows(stories, pools, plan)
    candidates: dict[str, Network] = {}
    told = _Told(network.embed.device)
    due = list(_CANDIDATES)
    step, snapshot = 0, plan.snapshot_seconds
    while clock.share < 1 and step < plan.max_steps:
        for group in optimizer.param_groups:
            group["lr"] = plan.peak * _rate(clock.share)
        story, skill = _backward(network, teacher, rows.take(), plan, losses)
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update(network)
        step += 1
        told.add(step, clock, (story, skill, norm.detach()))
        if due and clock.share > due[0]:
            candidates[f"average at {due.pop(0):.0%}"] = copied(average.network)
        if clock.elapsed > snapshot:
            snapshot += plan.snapshot_seconds
            save(average.network, plan.folder / "snapshot.safetensors")
    rows.close()
    save(average.network, plan.folder / "snapshot.safetensors")
    print(f"{step} steps in {clock.elapsed:.0f} s", flush=True)
    return candidates | {"average at the end": average.network, "last step": copied(network)}


def check_compiles(network: Network, teacher: Network, plan: Plan, losses: Losses) -> None:
    """Computes one step, so that a kernel that does not compile ends the run at its start."""
    ids = torch.randint(5, 4096, (plan.length,)).numpy().astype("uint16")
    row = make_row([Tokens(ids, ids > 0)], plan.length)
    _backward(network, teacher, ([row], row), plan, losses)
    network.zero_grad(set_to_none=True)


def _backward(network: Network, teacher: Network, rows: Step, plan: Plan, losses: Losses) -> tuple[Tensor, Tensor]:
    """Adds the gradients of a step; returns the mean loss of its story rows and the loss of its skill row."""
    stories, skills = rows
    total = torch.zeros((), device=network.embed.device)
    for story in stories:
        value = _story_loss(network, teacher, story.to(network.embed.device), plan.temperature, losses)
        torch.autograd.backward(value * (plan.story_weight / len(stories)))
        total += value.detach() / len(stories)
    row = skills.to(network.embed.device)
    own = network(row.ids, row.positions, masks_of(row, network.shape.windows))
    skill = losses.skill(own, network.norm, network.embed, row.targets, row.weights, network.shape.eps)
    torch.autograd.backward(skill)
    return total, skill.detach()


def _story_loss(network: Network, teacher: Network, row: Row, temperature: float, losses: Losses) -> Tensor:
    with torch.no_grad():
        theirs = teacher(row.ids, row.positions, masks_of(row, teacher.shape.windows))
    own = network(row.ids, row.positions, masks_of(row, network.shape.windows))
    return losses.story(
        own,
        network.norm,
        network.embed,
        theirs,
        teacher.norm,
        teacher.embed,
        row.weights,
        network.shape.eps,
        temperature,
    )


def _optimizer(network: Network, peak: float, fused: bool) -> torch.optim.Optimizer:
    wide = [one for one in network.parameters() if one.ndim > 1]
    narrow = [one for one in network.parameters() if one.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.02}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=fused)


def _rate(share: float) -> float:
    """Returns the learning rate's share of its peak."""
    return min(1.0, share / 0.03 + 0.02) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, share))) + 0.002


class _Clock:
    """Seconds since the start."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def share(self) -> float:
        """Returns the elapsed share of the training, from 0."""
        return self.elapsed / self._seconds


class _Told:
    """Prints the mean losses of every 50 steps, and those of the first."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, device=device)

    def add(self, step: int, clock: _Clock, values: tuple[Tensor, Tensor, Tensor]) -> None:
        self._sums += torch.stack(values)
        if step % 50 and step != 1:
            return
        story, skill, norm = (self._sums / (1 if step == 1 else 50)).tolist()
        self._sums.zero_()
        print(
            f"step {step} {clock.elapsed:.0f} s share {clock.share:.3f} story {story:.4f} skill {skill:.4f}"
            f" norm {norm:.2f}",
            flush=True,
        )


class _Rows:
    """Rows made ahead on a thread."""

    def __init__(self, stories: list[Tokens], pools: Pools, plan: Plan) -> None:
        self._queue: queue.Queue[Step] = queue.Queue(4)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, args=(stories, pools, plan), daemon=True)
        self._thread.start()

    def take(self) -> Step:
        """Returns rows of stories and a row of skills."""
        return self._queue.get(timeout=60)

    def close(self) -> None:
        self._closed.set()

    def _make(self, stories: list[Tokens], pools: Pools, plan: Plan) -> None:
        rng = Random(plan.seed)
        documents = shuffled(rng, stories)
        while not self._closed.is_set():
            told = [packed(documents, plan.length) for _ in range(plan.story_rows)]
            step = told, make_row(skills(rng, pools, plan.length), plan.length)
            while not self._closed.is_set():
                try:
                    self._queue.put(step, timeout=0.5)
                    break
                except queue.Full:
                    continue
