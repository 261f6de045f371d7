"""The walk that the kernels see, run on the CPU by the DSL's own JIT, against the score matrix it stands for."""

import itertools
import os

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
cute = pytest.importorskip("cutlass.cute", reason="the CuTe DSL has wheels for Linux only")
import cutlass  # noqa: E402

LENGTHS = [(300, 700), (700, 300), (256, 256), (1, 900), (900, 1)]
LIMITS = [(0, 0), (0, 63), (0, 300), (-100, 100), (-5, 900), (70, 90), (-900, 5), (200, 100), (1000, 2000), (3, 3)]
MOST = 64


def walked(tiles, has_lo, has_hi):
    """A compiled function: (numbers [cases, 4] = q_len, kv_len, lo, hi) -> found [cases, MOST, 3 + MOST] by row."""
    from cutlass import Int32
    from cutlass.cute.runtime import from_dlpack

    from flexbwd.sm90.walk import BandWalk

    @cute.jit
    def fill(numbers: cute.Tensor, found: cute.Tensor):
        for case in range(numbers.shape[0]):
            q_len, kv_len, lo, hi = numbers[case, 0], numbers[case, 1], numbers[case, 2], numbers[case, 3]
            walk = BandWalk(*tiles, has_lo, has_hi, q_len, kv_len, lo, hi)
            for row in range((q_len + tiles[0] - 1) // tiles[0]):
                runs = walk.runs(row, Int32(0), Int32(0))
                for k in cutlass.range_constexpr(3):
                    found[case, row, k] = runs[k]
                for i in range(runs[0] + runs[1] + runs[2]):
                    found[case, row, 3 + i] = walk.tile(row, Int32(0), Int32(0), i)

    def call(numbers):
        found = torch.zeros(len(numbers), MOST, 3 + MOST, dtype=torch.int32)
        fill(from_dlpack(numbers), from_dlpack(found))
        return found

    return call


@pytest.mark.parametrize("limits", ["dense", "lo", "hi", "both"])
@pytest.mark.parametrize("tiles", [(128, 128), (192, 80)], ids="{0[0]}x{0[1]}".format)
def test_a_band_walk_visits_every_live_tile_once_and_masks_where_it_must(tiles, limits):
    has_lo, has_hi = limits in ("lo", "both"), limits in ("hi", "both")
    cases = [(*lengths, *pair) for lengths, pair in itertools.product(LENGTHS, LIMITS)]
    found = walked(tiles, has_lo, has_hi)(torch.tensor(cases, dtype=torch.int32))
    for (q_len, kv_len, lo, hi), rows in zip(cases, found, strict=True):
        distance = torch.arange(q_len)[:, None] - torch.arange(kv_len)
        keep = torch.ones(q_len, kv_len, dtype=torch.bool)
        keep = keep & (distance >= lo) if has_lo else keep
        keep = keep & (distance <= hi) if has_hi else keep
        for row in range(-(-q_len // tiles[0])):
            partial, edge, full = rows[row, :3].tolist()
            visited = rows[row, 3 : 3 + partial + edge + full].tolist()
            assert len(set(visited)) == len(visited)
            mine = keep[row * tiles[0] : (row + 1) * tiles[0]]
            for n in range(-(-kv_len // tiles[1])):
                here = mine[:, n * tiles[1] : (n + 1) * tiles[1]]
                if here.any():
                    assert n in visited
                if n in visited[partial + edge :]:
                    assert here.all() and (n + 1) * tiles[1] <= kv_len
                elif n in visited[partial:]:
                    assert here.all()
            assert all(0 <= n < -(-kv_len // tiles[1]) for n in visited)
            assert not (has_lo or has_hi) or not edge
            assert has_lo or has_hi or not partial
