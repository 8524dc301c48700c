"""For all tests."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

# Where a shell runs the tests in the background it lets them ignore interrupts, and so would the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray gives its workers a low priority, so that beside other tests they would hardly run.
os.environ["RAY_worker_niceness"] = "0"

# No test fails because the machine is busy. HYPOTHESIS_EXAMPLES=100 makes the tests as thorough as Hypothesis does by default.
settings.register_profile("patient", deadline=None, max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "40")))
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def seed_everything() -> None:
    """Random numbers are the same in every run of a test."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
