"""An index that a kept element surely takes outside its tensor is refused, and only such an index."""

import warnings

import pytest
import torch

from flexbwd import flex_attention
from flexbwd.errors import ModBoundsError, ModOverflowWarning
from flexbwd.testing import make_case

SHORT, LONG, PAIRS = torch.zeros(99, dtype=torch.float64), torch.zeros(250), torch.zeros(2, 100)
IDS = torch.zeros(99, dtype=torch.int64)


def attend(score_mod=None, mask_mod=None, lengths=(100, 120)):
    case = make_case(lengths, heads=2, head_dim=8, batch=1)
    return flex_attention(case.query, case.key, case.value, score_mod, mask_mod=mask_mod)


@pytest.mark.parametrize(
    ("mods", "message"),
    {
        "mask-row": ({"mask_mod": lambda b, h, i, j: IDS[i] == 0}, r"IDS has 99 entries .* from 0 to 99"),
        "mask-col": ({"mask_mod": lambda b, h, i, j: IDS[j] == 0}, "from 0 to 119"),
        "score-row": ({"score_mod": lambda s, b, h, i, j: s + SHORT[i]}, "SHORT has 99"),
        "second-dim": ({"score_mod": lambda s, b, h, i, j: s + PAIRS[h, j]}, "dimension 1"),
        "pair": ({"score_mod": lambda s, b, h, i, j: s + SHORT[i - j + 20]}, "from -99 to 119"),
        "head": ({"score_mod": lambda s, b, h, i, j: s + LONG[h * 250]}, "from 0 to 250"),
    }.values(),
    ids=["mask-row", "mask-col", "score-row", "second-dim", "pair", "head"],
)
def test_a_tensor_too_short_for_the_lengths_is_named(mods, message):
    with pytest.raises(ModBoundsError, match=message) as caught:
        attend(**mods)
    assert "test_extents.py:" in str(caught.value)


@pytest.mark.parametrize(
    "mods",
    [
        {"score_mod": lambda s, b, h, i, j: s + SHORT[i - j], "mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 99)},
        {"score_mod": lambda s, b, h, i, j: s + SHORT[torch.clamp(j, max=98)]},
        {"score_mod": lambda s, b, h, i, j: s + LONG[i - j]},
        {"score_mod": lambda s, b, h, i, j: s + SHORT[j // 2]},
    ],
    ids=["masked-pair", "clamped", "wraps", "halved"],
)
def test_an_index_that_kept_elements_keep_inside_is_fine(mods):
    attend(**mods)


def test_another_length_is_checked_again():
    mod = lambda s, b, h, i, j: s + SHORT[i]  # noqa: E731
    attend(mod, lengths=(99, 120))
    with pytest.raises(ModBoundsError):
        attend(mod, lengths=(100, 120))


def test_int32_overflow_of_coordinates_warns():
    with pytest.warns(ModOverflowWarning, match="may reach 2160000114 and wrap"):
        attend(lambda s, b, h, i, j: s + (i * 20_000_000 + j * 1_512_606 > 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(lambda s, b, h, i, j: s + (i.long() * 30_000_000 + j > 5))
