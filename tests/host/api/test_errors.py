"""A user's mistake gets one message of ours: the argument, its value, the rule, the remedy."""

import pytest
import torch

import flexbwd
from flexbwd import errors, flex_attention


def qkv(*, h=2, hkv=2, s=20, skv=20, d=8, dv=8, b=1, dtype=torch.float32):
    q = torch.randn(b, h, s, d, dtype=dtype)
    return {
        "query": q,
        "key": torch.randn(b, hkv, skv, d, dtype=dtype),
        "value": torch.randn(b, hkv, skv, dv, dtype=dtype),
    }


def causal(b, h, q, k):
    return q >= k


def other(b, h, q, k):
    return q > k


CASES = {
    "query-3d": (lambda a: a | {"query": a["query"][0]}, errors.ShapeError, r"query.*\[B, H, S, D\]"),
    "not-a-tensor": (lambda a: a | {"key": [1.0]}, errors.DtypeError, "key is a list"),
    "int-dtype": (lambda a: {n: t.int() for n, t in a.items()}, errors.DtypeError, "query has dtype torch.int32"),
    "mixed-dtype": (lambda a: a | {"value": a["value"].double()}, errors.DtypeError, "value is torch.float64"),
    "sparse": (lambda a: a | {"key": a["key"].to_sparse()}, errors.UnsupportedError, "key has layout"),
    "head-dim": (lambda a: a | {"key": a["key"][..., :4]}, errors.ShapeError, "query has D=8 but key D=4"),
    "kv-length": (lambda a: a | {"value": a["value"][:, :, :9]}, errors.ShapeError, "key .* and value"),
    "batch": (lambda a: a | qkv(b=2) | {"query": a["query"].repeat(3, 1, 1, 1)}, errors.ShapeError, "batch 3"),
    "heads": (lambda a: a | {"query": a["query"].repeat(1, 2, 1, 1)[:, :3]}, errors.ShapeError, "3 heads"),
    "gqa-off": (lambda a: qkv(h=4) | {"enable_gqa": False}, errors.ShapeError, "enable_gqa=False"),
    "gqa-type": (lambda a: a | {"enable_gqa": 1}, errors.OptionError, "enable_gqa"),
    "index-base-type": (lambda a: a | {"index_base": 3}, errors.OptionError, "index_base is a int"),
    "scale-nan": (lambda a: a | {"scale": float("nan")}, errors.OptionError, "scale=nan"),
    "scale-tensor": (lambda a: a | {"scale": torch.tensor(1.0)}, errors.OptionError, "scale"),
    "layout": (lambda a: a | {"layout": "sbhd"}, errors.OptionError, "layout='sbhd'"),
    "backend": (lambda a: a | {"backend": "cuda"}, errors.OptionError, "backend='cuda'"),
    "precision": (lambda a: a | {"precision": "best"}, errors.OptionError, "precision='best'"),
    "deterministic": (lambda a: a | {"deterministic": "yes"}, errors.OptionError, "deterministic='yes'"),
    "kernel-options": (lambda a: a | {"kernel_options": {"BLOCK_M": 64}}, errors.OptionError, "BLOCK_M"),
    "kernel-options-value": (
        lambda a: a | {"kernel_options": {"cpu_tile_elements": 0}},
        errors.OptionError,
        "positive",
    ),
    "return-aux": (lambda a: a | {"return_aux": True}, errors.OptionError, "AuxRequest"),
    "lse-and-aux": (
        lambda a: a | {"return_lse": True, "return_aux": flexbwd.AuxRequest(lse=True)},
        errors.OptionError,
        "both",
    ),
    "score-mod-type": (lambda a: a | {"score_mod": 3}, errors.OptionError, "score_mod is a int"),
    "bwd-alone": (lambda a: a | {"score_mod_bwd": lambda g, s, b, h, i, j: g}, errors.OptionError, "without score_mod"),
    "block-mask-type": (lambda a: a | {"block_mask": torch.ones(2)}, errors.MaskError, "block_mask is a Tensor"),
    "two-masks": (
        lambda a: a | {"block_mask": flexbwd.create_block_mask(causal, None, None, 20, 20), "mask_mod": other},
        errors.MaskError,
        "and_masks",
    ),
    "mask-of-another-length": (
        lambda a: a | {"block_mask": flexbwd.create_block_mask(causal, None, None, 40, 40)},
        errors.MaskError,
        "40",
    ),
    "mask-of-other-heads": (
        lambda a: a | {"block_mask": flexbwd.create_block_mask(causal, 1, 4, 20, 20)},
        errors.MaskError,
        "4",
    ),
    "index-base": (
        lambda a: a | {"index_base": flexbwd.sparsity.IndexBase(q_base=torch.zeros(3, dtype=torch.int32))},
        errors.MaskError,
        "q_base",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_argument_is_named_with_its_value_and_remedy(case):
    change, kind, pattern = CASES[case]
    with pytest.raises(kind, match=pattern) as caught:
        flex_attention(**change(qkv()))
    assert isinstance(caught.value, errors.FlexError)
    assert "\n" not in str(caught.value)


def test_unknown_warmup_option_is_named():
    with pytest.raises(errors.OptionError, match="dropout"):
        flexbwd.warmup(*qkv().values(), dropout=0.1)


def test_a_tensor_on_another_device_is_refused():
    args = qkv()
    args["key"] = args["key"].to("meta")
    with pytest.raises(errors.DeviceError, match="key is on meta"):
        flex_attention(**args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("mask", [lambda b, h, i, j: i >= j, torch.ones(4, 4, dtype=torch.bool)], ids=["mod", "tensor"])
def test_a_block_mask_on_a_device_that_is_not_there(mask):
    with pytest.raises(errors.DeviceError, match=r"device='cuda' cannot hold the block mask here.*or None"):
        flexbwd.create_block_mask(mask, None, None, 4, 4, device="cuda")
