"""What tests of fused attention share."""

import pytest

KINDS = ("pairwise", "patchwise")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
EPS = 1e-5
