"""Results that must not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_same_bits_with_any_number_of_threads(compute: Callable[[], Sequence[Tensor]], case: object = "") -> None:
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(compute())
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other)), case
