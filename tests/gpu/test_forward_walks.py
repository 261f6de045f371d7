"""Bands and tile lists in the forward kernel, and many launches in a row."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd.sm90.forward.call import config_of, launch
from flexbwd.sm90.lists import TileLists
from flexbwd.sm90.walks import CAUSAL, Band, Dense, Lists
from tests.gpu.forward_cases import band_of, check, operands, poisoned, random_lists, raw_scores, run

pytestmark = pytest.mark.gpu

BANDS = [
    (0, 0),
    (0, 63),
    (0, 300),
    (-100, 100),
    (-5, None),
    (70, None),
    (None, 200),
    (None, -37),
    (200, 100),
    (-900, 5),
]
LENGTHS = [(300, 700), (700, 300), (1, 1000), (1000, 1), (640, 640)]


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids="d{0[0]}".format)
@pytest.mark.parametrize("lengths", LENGTHS, ids="q{0[0]}-kv{0[1]}".format)
@pytest.mark.parametrize("band", BANDS, ids="lo{0[0]}-hi{0[1]}".format)
def test_bands_match_fp64(band, lengths, dims):
    op, walk = operands(lengths, dims), Band(*band)
    check(op, run(op, walk, want_max=True), raw_scores(op).masked_fill(~band_of(op, walk), -math.inf))


def listed(op, sizes, seed=0):
    tile = config_of(op, Lists(TileLists(*[torch.empty(0)] * 3))).tile
    return random_lists(op, (tile.tile_m, tile.tile_n), sizes, seed)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids="d{0[0]}-dv{0[1]}".format)
@pytest.mark.parametrize("lengths", [(700, 900), (1024, 1024), (100, 2000), (2000, 100)], ids="q{0[0]}-kv{0[1]}".format)
def test_lists_visit_what_they_say(lengths, dims):
    op = operands(lengths, dims, heads=(4, 2))
    walk, kept = listed(op, (2, 4))
    check(op, run(op, walk, want_max=True), raw_scores(op).masked_fill(~kept, -math.inf))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4)], ids="b{0[0]}-h{0[1]}".format)
def test_one_list_serves_all_heads_or_batches(sizes):
    op = operands((700, 900), (128, 128), heads=(4, 2))
    walk, kept = listed(op, sizes)
    check(op, run(op, walk), raw_scores(op).masked_fill(~kept, -math.inf))


def test_lists_without_tiles_give_zero_rows():
    op = operands((300, 300), (128, 128))
    walk, _ = listed(op, (1, 1))
    walk.lists.counts.zero_()
    got = run(op, walk, want_max=True)
    assert (got.out == 0).all() and (got.lse == -math.inf).all() and (got.top == -math.inf).all()


@pytest.mark.parametrize("walk", [Dense(), CAUSAL, Band(0, 200)], ids=["dense", "causal", "window"])
def test_a_thousand_launches_in_a_row_agree(walk):
    """Work tickets are put back, and a launch that starts early waits for what it reads."""
    op = operands((1000, 1000), (64, 64), heads=(16, 16))
    first = run(op, walk)
    for _ in range(20):
        several = [poisoned(op) for _ in range(50)]
        for got in several:
            launch(op, walk, *got)
        assert all(torch.equal(got.out, first.out) and torch.equal(got.lse, first.lse) for got in several)


def test_a_launch_reads_what_the_kernel_before_it_wrote():
    op = operands((500, 500), (128, 128))
    want, query = run(op, CAUSAL), op.query.clone()
    for _ in range(200):
        op.query.fill_(math.nan)
        op.query.copy_(query)
        got = poisoned(op)
        launch(op, CAUSAL, *got)
        assert torch.equal(got.out, want.out)


def test_streams_do_not_share_tickets():
    op = operands((2000, 2000), (64, 64), heads=(4, 4))
    want = run(op, CAUSAL)
    streams = [torch.cuda.Stream() for _ in range(4)]
    all_got = []
    torch.cuda.synchronize()
    for i in range(80):
        with torch.cuda.stream(streams[i % 4]):
            all_got.append(poisoned(op))
            launch(op, CAUSAL, *all_got[-1])
    torch.cuda.synchronize()
    assert all(torch.equal(got.out, want.out) for got in all_got)


def test_a_graph_replays_beside_eager_launches():
    op = operands((2000, 2000), (64, 64), heads=(4, 4))
    want, got = run(op, CAUSAL), poisoned(op)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(op, CAUSAL, *got)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            graph.replay()
        assert torch.equal(run(op, CAUSAL).out, want.out)
    torch.cuda.synchronize()
    assert torch.equal(got.out, want.out)
