"""A warm-up asks for the kernels of the very call, also of fake tensors and on a machine without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexbwd import AuxRequest, mods, warmup
from flexbwd.errors import OptionError
from flexbwd.jit.warm import gathering
from flexbwd.sm90.forward.config import FwdConfig

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="fake tensors stand for a GPU that is not there")


def forward_of(*args, **options):
    """The forward kernel that a warm-up of fake bf16 tensors asks for."""
    with FakeTensorMode():
        tensors = [torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    with gathering() as jobs:
        warmup(*tensors, *args, **options)
    (config,) = (c for c, _ in jobs if isinstance(c, FwdConfig))
    return config


@needs_no_gpu
def test_lists_and_mods_are_part_of_the_kernel():
    config = forward_of(mods.softcap(3.0), mask_mod=mods.prefix_lm(100))
    assert config.walk.lists
    assert config.mods.has_score
    assert config.mods.has_mask


@needs_no_gpu
def test_row_maxima_are_another_kernel():
    assert forward_of(return_aux=AuxRequest(max_scores=True)).want_max
    assert not forward_of(return_lse=True).want_max


def test_an_unknown_argument_is_named_with_the_known():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(OptionError, match=r"dropout.*score_mod"):
        warmup(q, q, q, dropout=0.1)
