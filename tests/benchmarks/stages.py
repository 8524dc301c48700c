"""The attention of single stages of SAN10, for benchmarks on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention

# Channels, side of the map and footprint of SAN10's stages at 224x224.
STAGES = {
    "stage 1": (64, 112, 3),
    "stage 2": (256, 56, 7),
    "stage 3": (512, 28, 7),
    "stage 4": (1024, 14, 7),
    "stage 5": (2048, 7, 7),
}
KINDS: dict[str, type[PairwiseAttention] | type[PatchwiseAttention] | type[ScalarAttention]] = {
    "pairwise": PairwiseAttention,
    "patchwise": PatchwiseAttention,
    "scalar": ScalarAttention,
}


class Core:
    """The attention of one stage, from phi, psi and beta to y.

    Args:
        largest_side: limit for the size of maps, for tests.
        half: whether phi, psi and beta are bfloat16, as under autocast.
    """

    def __init__(
        self, kind: str, stage: str, batch: int, device: str = "cpu", half: bool = False, largest_side: int = 224
    ) -> None:
        self.channels, side, self.footprint = STAGES[stage]
        self.side, self.batch = min(side, largest_side), batch
        self.attention = KINDS[kind](self.channels, self.footprint).to(device)
        x = torch.randn(batch, self.channels, self.side, self.side, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=half):
            maps = [m.detach().contiguous(memory_format=torch.channels_last) for m in self.attention.transform(x)]
        self.phi, self.psi, self.beta = (m.requires_grad_() for m in maps)
        self.grad = torch.randn_like(self.beta)
        outside = ("phi", "psi", "beta")
        own = (x for name, x in self.attention.named_parameters() if not name.startswith(outside))
        self.wanted = [self.phi, self.psi, self.beta, *own]

    def train(self) -> None:
        """Runs forward and backward in training."""
        self.attention.train()
        torch.autograd.grad(self.attention.attend(self.phi, self.psi, self.beta), self.wanted, self.grad)

    def evaluate(self) -> None:
        """Runs forward in evaluation."""
        self.attention.eval()
        with torch.no_grad():
            self.attention.attend(self.phi, self.psi, self.beta)

    def flops(self, training: bool) -> int:
        """Returns the FLOPs of gamma or the dot products, and of the aggregation, without recomputation.

        There are two per multiply-accumulate. Each product counts once in forward and twice in backward.
        """
        pixels, K = self.batch * self.side**2, self.footprint**2
        if isinstance(self.attention, ScalarAttention):
            return pixels * K * 2 * (self.attention.relation_channels + self.attention.value_channels) * (3 if training else 1)
        d_to_E, E_to_G = (2 * self.attention.gamma.get_parameter(f"{i}.weight").numel() for i in (2, 5))
        M = 2 * self.attention.value_channels
        pairwise = isinstance(self.attention, PairwiseAttention)
        once = K * (d_to_E + E_to_G + M) if pairwise else d_to_E + E_to_G + K * M
        return pixels * once * (3 if training else 1)

    def bytes(self, training: bool) -> int:
        """Returns the minimum traffic: each map and, in training, its gradient is read or written once."""
        maps = sum(m.numel() for m in (self.phi, self.psi, self.beta, self.beta))
        return self.beta.element_size() * maps * (2 if training else 1)


MODES: dict[str, Callable[[Core], None]] = {"train": Core.train, "eval": Core.evaluate}
