"""The Hopper backend with its kernels played by dense torch code: what they are handed gives the oracle's results.

The players see what a kernel sees: the operands, the walk over its own tiles, and mods with their captured tensors.
Tile lists, tables for bits and odd blocks, bands, padding, the choice between one pass and two are the real ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexbwd import BlockMask, and_masks, backends, create_block_mask, mods
from flexbwd.modgraph.to_torch import evaluate
from flexbwd.plan import Gradients
from flexbwd.sm90 import backend, parts
from flexbwd.sm90.walks import Band, Lists
from flexbwd.sparsity.tensors import IndexBase
from flexbwd.testing import assert_matches_reference, attention_grads, make_case


class Given(NamedTuple):
    """What stands in for a compiled kernel's mods."""

    mods: Any
    captures: tuple[Tensor, ...]
    base: IndexBase | None


class Player:
    """One kernel: dense, in fp32, over the elements that its walk and mods keep."""

    def __init__(self, kernel: Any, use: parts.Use, walk: Any, given: Any) -> None:
        self.q, self.k, self.v = (t.float() for t in (kernel.query, kernel.key, kernel.value))
        self.group, self.scale, self.use = kernel.group, kernel.scale, use
        shape = (kernel.batch, kernel.q_heads, kernel.q_len, kernel.kv_len)
        self.coordinates = self._coordinates(shape, given)
        self.given = given if isinstance(given, Given) else None
        self.kept = self._kept(walk, shape)

    def _coordinates(self, shape: tuple[int, ...], given: Any) -> dict[str, Tensor]:
        ranges = [torch.arange(n, dtype=torch.int32) for n in shape]
        base = given.base if isinstance(given, Given) else None
        if base is not None:
            ranges[0], ranges[1] = ranges[0] + base.b_off, ranges[1] + base.h_off
            for at, offsets in ((2, base.q_base), (3, base.kv_base)):
                if offsets is not None:
                    ranges[at] = ranges[at] + offsets.repeat_interleave(base.block_size[at - 2])[: shape[at]]
        names = ("b", "h", "q_idx", "kv_idx")
        return {n: r.view([-1 if d == i else 1 for d in range(4)]) for i, (n, r) in enumerate(zip(names, ranges))}  # noqa: B905

    def _value(self, root: Any, score: Tensor) -> Tensor:
        assert self.given is not None
        (found,) = evaluate([root], {"score": score, **self.coordinates}, self.given.captures, torch.float32)
        return found.expand(score.shape)

    def _kept(self, walk: Any, shape: tuple[int, ...]) -> Tensor:
        i, j = torch.arange(shape[2])[:, None], torch.arange(shape[3])
        kept = torch.ones(shape, dtype=torch.bool)
        if isinstance(walk, Band):
            kept &= (i - j >= (walk.lo if walk.lo is not None else -(1 << 40))) & (
                i - j <= (walk.hi if walk.hi is not None else 1 << 40)
            )
        elif isinstance(walk, Lists):
            kept = self._listed(walk.lists, shape)
        if self.given is not None and self.given.mods.score_keep is not None:
            kept = kept & self._value(self.given.mods.score_keep, torch.zeros(shape))
        return kept

    def _listed(self, lists: Any, shape: tuple[int, ...]) -> Tensor:
        turn = -1 if self.use.keys_are_rows else 1
        (row_size, column_size), (row_len, column_len) = self.use.tile[::turn], shape[2:][::turn]
        rows, columns = -(-row_len // row_size), -(-column_len // column_size)
        kinds = torch.full((*shape[:2], rows, columns), 3)
        counts = lists.counts.expand(*shape[:2], -1, -1)
        tiles = lists.tiles.expand(*shape[:2], -1, -1)
        for b, h, r in torch.cartesian_prod(*(torch.arange(n) for n in kinds.shape[:3])).tolist():
            entries = iter(tiles[b, h, r].tolist())
            for kind in range(3):
                for _ in range(int(counts[b, h, r, kind])):
                    kinds[b, h, r, next(entries)] = kind
        heads = shape[1] // self.group if self.use.keys_are_rows else shape[1]
        assert sorted(lists.order.tolist()) == list(range(shape[0] * heads * rows))
        grid = kinds.repeat_interleave(row_size, 2)[:, :, :row_len].repeat_interleave(column_size, 3)[..., :column_len]
        grid = grid.mT if self.use.keys_are_rows else grid
        ragged = (torch.arange(shape[3]) // self.use.tile[1] + 1) * self.use.tile[1] > shape[3]
        assert not ((grid == 2) & ragged).any()
        mask = None if self.given is None else self.given.mods.mask
        partial = grid == 0 if mask is None else (grid == 0) & self._value(mask, torch.zeros(shape))
        return partial | (grid == 1) | (grid == 2)

    def scores(self) -> tuple[Tensor, Tensor]:
        """s and s', -inf where nothing is kept."""
        raw = self.scale * self.q @ self.k.repeat_interleave(self.group, 1).mT
        modified = raw if self.given is None else self._value(self.given.mods.forward, raw)
        return raw, modified.masked_fill(~self.kept, -torch.inf)

    def gradients(self, result: Any, needs: Any) -> Gradients:
        out, lse, grad_out, grad_lse = result
        raw, modified = self.scores()
        p = (modified - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp()
        value = self.v.repeat_interleave(self.group, 1)
        delta = (grad_out.float() * out.float()).sum(-1) - (0 if grad_lse is None else grad_lse)
        ds = p * (grad_out.float() @ value.mT - delta[..., None])
        if self.given is not None:
            ds = (ds * self._value(self.given.mods.j_score, raw)).masked_fill(p == 0, 0.0)
        by_group = lambda t: t.unflatten(1, (-1, self.group)).sum(2)  # noqa: E731
        dq = self.scale * ds @ self.k.repeat_interleave(self.group, 1)
        dk, dv = by_group(self.scale * ds.mT @ self.q), by_group(p.mT @ grad_out.float())
        dtype = out.dtype
        found = [g.to(dtype) if n else None for g, n in zip((dq, dk, dv), needs.__dict__.values(), strict=False)]
        return Gradients(*found)


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """CPU tensors go to the Hopper backend, and its kernels are players."""
    uses: dict[int, Any] = {}
    real = parts.parts_of

    def parts_of(op, use):
        found = real(op, use)
        uses[id(found.walk)] = (use, found)  # the parts stay alive with their id
        return found

    def player(kernel, walk, config):
        return Player(kernel, uses[id(walk)][0], walk, config)

    def launch(kernel, walk, out, lse, top, found):
        scores = player(kernel, walk, found[0]).scores()[1]
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        out.copy_(weights @ kernel.value.float().repeat_interleave(kernel.group, 1))
        lse.copy_(scores.logsumexp(-1))
        if top is not None:
            top.copy_(scores.amax(-1))

    def one_pass(kernel, out, lse, grad_out, grad_lse, needs, walk, found, *rest, **named):
        return player(kernel, walk, found[0]).gradients((out, lse, grad_out, grad_lse), needs)

    def in_two_passes(kernel, result, needs, dq, dkv):
        by_queries = player(kernel, dq.walk, dq.mods[0]).gradients(result, needs)
        by_keys = player(kernel, dkv.walk, dkv.mods[0]).gradients(result, needs)
        return Gradients(by_queries.query, by_keys.key, by_keys.value)

    def of(mod_plan, captures, use, base=None):
        return Given(mod_plan, tuple(captures), base), ()

    monkeypatch.setattr(backends, "choose", lambda name, device: "sm90")
    monkeypatch.setattr(backend, "parts_of", parts_of)
    monkeypatch.setattr(parts.ModConfig, "of", of)
    monkeypatch.setattr(backend, "launch", launch)
    monkeypatch.setattr(backend, "one_pass", one_pass)
    monkeypatch.setattr(backend.two_pass, "backward_two_pass", in_two_passes)


def causal(b, h, i, j):
    return i >= j


def capped(s, b, h, i, j):
    return 4 * torch.tanh(s / 4) - 0.05 * (h + 1) * (i - j).abs()


def hides(s, b, h, i, j):
    return torch.where((i + j) % 3 == 0, -torch.inf, s)


def few_blocks() -> BlockMask:
    cnt, idx = torch.tensor([[[1, 2, 1]]], dtype=torch.int32), torch.tensor([[[[0, 0], [2, 0], [1, 0]]]])
    full = (torch.tensor([[[0, 0, 1]]], dtype=torch.int32), torch.tensor([[[[0], [0], [3]]]], dtype=torch.int32))
    return BlockMask.from_kv_blocks(cnt, idx.int(), *full, BLOCK_SIZE=(96, 48), mask_mod=causal, seq_lengths=(270, 190))


IDS = torch.arange(400, dtype=torch.int32) // 70
DENSE = torch.rand(2, 1, 270, 190, generator=torch.Generator().manual_seed(0)) < 0.4
CALLS: dict[str, Any] = {
    "dense": {},
    "causal, a band": {"mask_mod": causal},
    "window, a band": {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 60)},
    "score mod": {"score_mod": capped},
    "score mod that hides": {"score_mod": hides, "mask_mod": causal},
    "documents": {"mask_mod": and_masks(causal, mods.document(IDS)), "score_mod": capped},
    "a mask that reads the head": {"mask_mod": lambda b, h, i, j: i - j >= 40 * h - 60},
    "rows and batches with nothing": {"mask_mod": lambda b, h, i, j: (b == 1) & (i > 130) & (j < i - 20)},
    "blocks of 64": {"block_mask": create_block_mask(mods.document(IDS), None, None, 270, 190, "cpu", BLOCK_SIZE=64)},
    "odd blocks, some of them full": {"block_mask": few_blocks()},
    "bits": {"mask_mod": DENSE},
    "an index base": {
        "mask_mod": causal,
        "score_mod": capped,
        "index_base": IndexBase(1, 2, torch.tensor([0, 300, 64]).int(), torch.tensor([128, 0]).int()),
    },
}


@pytest.mark.parametrize("head_dim", [64, 128, (192, 128), 256, 20], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_what_kernels_are_handed_gives_the_oracles_results(name, head_dim):
    case = make_case((270, 190), (4, 2), head_dim, torch.bfloat16, batch=2)
    options = dict(CALLS[name])
    got = attention_grads(case, options.pop("score_mod", None), options.pop("mask_mod", None), **options)
    reference = {k: v for k, v in options.items() if k in ("block_mask", "index_base")}
    assert_matches_reference(case, got, CALLS[name].get("score_mod"), CALLS[name].get("mask_mod"), **reference)


def test_deterministic_calls_take_two_passes():
    case = make_case((270, 190), (4, 2), 64, torch.float16)
    got = attention_grads(case, capped, mods.document(IDS), deterministic=True)
    assert_matches_reference(case, got, capped, mods.document(IDS))
