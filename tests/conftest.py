"""What all tests share: the workers of `harness` end with the session."""

from collections.abc import Iterator

import pytest
from harness import close_pools


@pytest.fixture(scope="session", autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    close_pools()
