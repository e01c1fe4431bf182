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

from train.chat import Tokens
from train.network import Network, compute_dtype, normed, save
from train.packing import Row, make_row, masks_of, packed
from train.pools import Pools, shuffled, skills


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast."""

    seconds: float
    length: int  # tokens of a row
    peak: float  # learning rate
    seed: int
    folder: Path  # of snapshots
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
) -> Tensor:
    """KL from the teacher's next-token distribution, nats a token."""
    own = _log_shares(x, norm, embed, eps)
    theirs = _log_shares(teacher_x, teacher_norm, teacher_embed, eps)
    each = (theirs.exp() * (theirs - own)).sum(-1)
    return (each * weights).sum() / weights.sum().clamp(min=1)


def skill_loss(x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Cross entropy, nats a token."""
    own = _log_shares(x, norm, embed, eps)
    each = -own.gather(-1, targets[:, None])[:, 0]
    return (each * weights).sum() / weights.sum().clamp(min=1)


def _log_shares(x: Tensor, norm: Tensor, embed: Tensor, eps: float) -> Tensor:
    dtype = compute_dtype(x)
    return functional.linear(normed(x, norm, eps).to(dtype), embed.to(dtype)).float().log_softmax(-1)


def train(network: Network, teacher: Network, stories: list[Tokens], pools: Pools, plan: Plan) -> None:
    """Trains in place; the learning rate follows the clock."""
    device = network.embed.device
    losses: tuple[Callable[..., Tensor], Callable[..., Tensor]] = (story_loss, skill_loss)
    if device.type == "cuda":
        losses = (torch.compile(story_loss, dynamic=False), torch.compile(skill_loss, dynamic=False))
    optimizer = _optimizer(network, plan.peak, fused=device.type == "cuda")
    clock = _Clock(plan.seconds)
    rows = _Rows(stories, pools, plan, clock)
    told: Tensor = torch.zeros(3, device=device)
    step, snapshot = 0, plan.snapshot_seconds
    while clock.share < 1 and step < plan.max_steps:
        story_row, skill_row = (row.to(device) for row in rows.take())
        for group in optimizer.param_groups:
            group["lr"] = plan.peak * _rate(clock.share)
        story = _backward_stories(network, teacher, story_row, losses[0])
        skill = _backward_skills(network, skill_row, losses[1])
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        told += torch.stack((story, skill, norm.detach()))
        if step % 50 == 0 or step == 1:
            mean = (told / (1 if step == 1 else 50)).tolist()
            told.zero_()
            print(
                f"step {step} {clock.elapsed:.0f} s share {clock.share:.3f} story {mean[0]:.4f} skill {mean[1]:.4f}"
                f" norm {mean[2]:.2f}",
                flush=True,
            )
        if clock.elapsed > snapshot:
            snapshot += plan.snapshot_seconds
            save(network, plan.folder / "snapshot.safetensors")
    rows.close()


def check_compiles(network: Network, teacher: Network, length: int) -> None:
    """Computes one row forth and back, so that a kernel that does not compile ends the run at its start."""
    ids = torch.randint(5, 4096, (length,)).numpy().astype("uint16")
    row = make_row([Tokens(ids, ids > 0)], length).to(network.embed.device)
    _backward_stories(network, teacher, row, story_loss)
    network.zero_grad(set_to_none=True)


def _backward_stories(network: Network, teacher: Network, row: Row, loss: Callable[..., Tensor]) -> Tensor:
    with torch.no_grad():
        theirs = teacher(row.ids, row.positions, masks_of(row, teacher.shape.windows))
    own = network(row.ids, row.positions, masks_of(row, network.shape.windows))
    value = loss(own, network.norm, network.embed, theirs, teacher.norm, teacher.embed, row.weights, network.shape.eps)
    torch.autograd.backward(value)
    return value.detach()


def _backward_skills(network: Network, row: Row, loss: Callable[..., Tensor]) -> Tensor:
    own = network(row.ids, row.positions, masks_of(row, network.shape.windows))
    value = loss(own, network.norm, network.embed, row.targets, row.weights, network.shape.eps)
    torch.autograd.backward(value)
    return value.detach()


def _optimizer(network: Network, peak: float, fused: bool) -> torch.optim.Optimizer:
    wide = [one for one in network.parameters() if one.ndim > 1]
    narrow = [one for one in network.parameters() if one.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.02}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=fused)


def _rate(share: float) -> float:
    """The learning rate's share of its peak."""
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
        """Of the training that is over, from 0."""
        return self.elapsed / self._seconds


class _Rows:
    """Rows made ahead on a thread."""

    def __init__(self, stories: list[Tokens], pools: Pools, plan: Plan, clock: _Clock) -> None:
        self._queue: queue.Queue[tuple[Row, Row]] = queue.Queue(4)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, args=(stories, pools, plan, clock), daemon=True)
        self._thread.start()

    def take(self) -> tuple[Row, Row]:
        """Returns a row of stories and a row of skills."""
        return self._queue.get(timeout=60)

    def close(self) -> None:
        self._closed.set()

    def _make(self, stories: list[Tokens], pools: Pools, plan: Plan, clock: _Clock) -> None:
        rng = Random(plan.seed)
        documents = shuffled(rng, stories)
        while not self._closed.is_set():
            pair = packed(documents, plan.length), make_row(skills(rng, pools, plan.length, clock.share), plan.length)
            while not self._closed.is_set():
                try:
                    self._queue.put(pair, timeout=0.5)
                    break
                except queue.Full:
                    continue
