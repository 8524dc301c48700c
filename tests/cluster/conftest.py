"""One Ray session for all tests of this folder, because starting one takes seconds."""

from collections.abc import Iterator

import pytest

from cluster import Resources
from cluster.session import session


@pytest.fixture(scope="package")
def resources() -> Iterator[Resources]:
    with session() as resources:
        yield resources
