"""Shared by all tests: which ones this machine can run, and hypothesis without deadlines or chance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("flexbwd", deadline=None, derandomize=True, database=None)
settings.load_profile("flexbwd")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if hopper:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU of compute capability 9.0"))
