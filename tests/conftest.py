"""For all tests."""

import gc
import os

# OpenMP's threads wait without computing: on a busy machine, waiting took a third of the time. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings
from pytest_timeout import Settings

# Where a shell runs the tests in the background it lets them ignore interrupts, and so would the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What the developer's shell sets for the product does not reach the tests, except settings of the kernels.
KERNELS = ("SAN_CACHE", "SAN_CPU", "SAN_CUDA")
PRODUCT = ("RAY_", "TUNE_", "MLFLOW_", "SAN_", "AWS_", "DEEPSPEED_", "DS_ACCELERATOR", "LOCAL_RANK", "GIT_")
for name in [name for name in os.environ if name.startswith(PRODUCT) and name not in KERNELS]:
    del os.environ[name]

# The servers of the tests are on this machine, which no proxy reaches.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"

# Ray gives its workers a low priority, so that beside other tests they would hardly run.
os.environ["RAY_worker_niceness"] = "0"

# No test fails because the machine is busy, and every run has the same examples. HYPOTHESIS_EXAMPLES=1000 draws new ones.
examples = os.environ.get("HYPOTHESIS_EXAMPLES")
settings.register_profile("patient", deadline=None, derandomize=examples is None, max_examples=int(examples or 40))
settings.load_profile("patient")

SECONDS_FOR_STACKS = 30.0
"""Before the end of a test that hangs."""
LONGEST = ("test_end_to_end.py", "test_export.py", "test_cuda_sources.py", "test_nodes.py", "test_submit.py", "test_guides.py")
"""Files with minutes of slow tests, which come first, so that no process works alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if " " in sys.prefix:
        for item in (item for item in items if item.get_closest_marker("compiles")):
            item.add_marker(pytest.mark.skip("torch.compile fails where the path of the environment has a space"))


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Random numbers are the same in every run of a test, and variables of the environment that it sets end with it. Operators
    have one thread, because another test runs at the same time; tests of several threads set their number."""
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(scope="module", autouse=True)
def imports_are_kept() -> None:
    """What is alive before a file of tests lives until the end. `gc.collect`, which each trial of a grid calls, would take a
    second to search all of it."""
    gc.collect()
    gc.freeze()


def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> None:
    """Before `pytest-timeout` ends a hanging test and prints the stacks of this process, prints those of the processes that the
    test has started, and kills them."""
    timer = threading.Timer(max(settings.timeout - SECONDS_FOR_STACKS, settings.timeout / 2), _print_stacks, [item])
    timer.daemon = True
    timer.start()
    item.stash[TIMER] = timer


def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    if TIMER in item.stash:
        item.stash[TIMER].cancel()


TIMER = pytest.StashKey[threading.Timer]()


def _print_stacks(item: pytest.Item) -> None:
    text = f"{item.nodeid} hangs; its processes:\n"
    processes = psutil.Process().children(recursive=True)
    for process in processes:  # before any is killed, because children may end with their parent
        spy = [os.path.join(os.path.dirname(sys.executable), "py-spy"), "dump", "--pid", str(process.pid)]
        dump = subprocess.run(spy, capture_output=True, text=True)
        text += dump.stdout or f"Process {process.pid}: no stack: {dump.stderr.strip()}\n"
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    capture = item.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(text, file=sys.stderr, flush=True)
