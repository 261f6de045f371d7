"""Text pictures of block masks."""

import pytest
import torch

from flexbwd.errors import OptionError
from flexbwd.sparsity import BlockMask, create_block_mask
from flexbwd.sparsity.render import picture


def causal(b, h, q, k):
    return q >= k


def test_a_picture_has_one_pair_of_glyphs_per_block():
    mask = create_block_mask(causal, None, None, 48, 64, BLOCK_SIZE=16)
    assert mask.to_string() == "(0, 0)\n░░      \n██░░    \n████░░  "


def test_str_tells_shape_and_sparsity():
    text = str(create_block_mask(causal, None, None, 32, 32, BLOCK_SIZE=16))
    assert text == "BlockMask(shape=(1, 1, 32, 32), sparsity=25.00%,\n(0, 0)\n░░  \n██░░\n)"


def test_repr_tells_every_size_and_the_mask():
    text = repr(create_block_mask(causal, None, None, 32, 32, BLOCK_SIZE=16))
    for part in ("shape=(1, 1, 32, 32)", "block_size=(16, 16)", "sparsity=25.00%", "mask_mod=causal", "device=cpu"):
        assert part in text


def test_tiles_of_blocks_are_full_or_empty_only_when_all_their_blocks_are():
    classes = torch.tensor([[2, 2, 0, 0, 2], [2, 2, 0, 0, 2], [1, 0, 0, 0, 2]])
    assert picture(classes, (2, 3)).split("\n") == ["██  ██", "░░  ██"]


def test_minus_one_shows_every_block():
    mask = create_block_mask(causal, None, None, 16 * 40, 16 * 40, BLOCK_SIZE=16)
    assert len(mask.to_string(-1).split("\n")) == 41
    assert len(mask.to_string().split("\n")) == 21
    assert len(mask.to_string((5, 40)).split("\n")) == 6


def test_more_than_limit_pairs_are_counted():
    cnt = torch.zeros(2, 3, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(cnt, torch.zeros(2, 3, 1, 1, dtype=torch.int32))
    text = mask.to_string(limit=2)
    assert text.count("(") == 3
    assert "(0, 1)" in text
    assert "... 4 more" in text


@pytest.mark.parametrize("bad", [0, -2, (3,), (0, 3), (True, 1), 1.5, "ab"], ids=repr)
def test_a_bad_grid_size_is_refused(bad):
    with pytest.raises(OptionError, match="grid_size"):
        create_block_mask(causal, None, None, 32, 32).to_string(bad)


def test_a_bad_limit_is_refused():
    with pytest.raises(OptionError, match="limit"):
        create_block_mask(causal, None, None, 32, 32).to_string(limit=-1)
