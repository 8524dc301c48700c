"""One Ray session for all tests of this folder, because starting one takes seconds."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from cluster import Resources
from cluster.session import session


@pytest.fixture(scope="package")
def resources() -> Iterator[Resources]:
    with patch.dict(os.environ):  # Ray and the session set variables
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray would leave a trial the number of the developer's shell
        with session() as resources:
            yield resources
