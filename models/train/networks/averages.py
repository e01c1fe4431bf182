"""Networks made of others' weights: copies, blends of two, and the mean of a training's last steps."""

from __future__ import annotations

import torch
from train.networks.network import Network


@torch.no_grad()
def copied(network: Network) -> Network:
    """Returns the network with weights of its own that are not trained."""
    made = Network(network.shape, network.kernels).to(network.embed.device).requires_grad_(False)
    for own, other in zip(made.parameters(), network.parameters(), strict=True):
        own.copy_(other)
    return made


@torch.no_grad()
def blended(network: Network, other: Network, share: float) -> Network:
    """Returns a copy of the network whose weights are moved by `share` of the way to the other's."""
    made = copied(network)
    for own, towards in zip(made.parameters(), other.parameters(), strict=True):
        own.lerp_(towards, share)
    return made


class Average:
    """The exponential mean of a network's weights over its steps, about the last `1 / (1 - decay)` of them."""

    def __init__(self, network: Network, decay: float) -> None:
        self.network = copied(network)
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self, network: Network) -> None:
        """Adds the weights of one more step. The first steps weigh less, so that the start is soon gone."""
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 10))
        torch._foreach_lerp_(list(self.network.parameters()), list(network.parameters()), 1 - decay)
