"""Brute force over every element, and random mask programs: the oracles of the block-list tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flexbwd.modgraph.ir import BOOL, COMPARE, I32, I64, Builder, F, Node, topological
from flexbwd.sparsity.tensors import BlockSparseTensors

_BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.true_divide, "max": torch.maximum,
    "min": torch.minimum, "pow": torch.pow, "mod": torch.remainder, "fmod": torch.fmod, "and": torch.bitwise_and,
    "or": torch.bitwise_or, "xor": torch.bitwise_xor, "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift, "fdiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "tdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}  # fmt: skip
_OTHER = {"where": torch.where, "not": torch.bitwise_not, "rcp": torch.reciprocal, "detach": lambda x: x}


def evaluate(root: Node, inputs: dict[str, Tensor], captures: Sequence[Tensor], dtype=torch.float32) -> dict:
    """Value of every node of the graph: one torch call per node, written apart from flexbwd's own evaluator."""
    dtypes = {F: dtype, I32: torch.int32, I64: torch.int64, BOOL: torch.bool}
    values: dict[Node, Tensor] = {}
    for node in topological([root]):
        args = [values[a] for a in node.args]
        if node.op == "in":
            values[node] = inputs[node.attr]
        elif node.op == "const":
            values[node] = torch.tensor(node.value, dtype=dtypes[node.dtype])
        elif node.op == "cast":
            values[node] = args[0].to(dtypes[node.dtype])
        elif node.op == "load":
            capture = captures[node.attr]
            index = [torch.where(i < 0, i + n, i).clamp(0, n - 1).long() for i, n in zip(args, capture.shape)]  # noqa: B905
            values[node] = (capture[tuple(index)] if index else capture).to(dtypes[node.dtype])
        else:
            call = _BINARY.get(node.op) or _OTHER.get(node.op) or getattr(torch, node.op)
            values[node] = call(*args)
    return values


def coordinates(B: int, H: int, q_idx: Tensor, kv_idx: Tensor, b_off: int = 0, h_off: int = 0) -> dict[str, Tensor]:
    """Inputs of a graph on the full grid `[B, H, q, kv]`."""
    return {
        "b": (torch.arange(B, dtype=torch.int32) + b_off)[:, None, None, None],
        "h": (torch.arange(H, dtype=torch.int32) + h_off)[None, :, None, None],
        "q_idx": q_idx.to(torch.int32)[:, None],
        "kv_idx": kv_idx.to(torch.int32),
    }


def classes_of(dense: Tensor, block_size: tuple[int, int]) -> Tensor:
    """0 empty, 1 partial, 2 full, for every block of `dense [B, H, Sq, Skv]`; only real elements count."""
    B, H, Sq, Skv = dense.shape
    grid = torch.zeros(B, H, -(-Sq // block_size[0]), -(-Skv // block_size[1]), dtype=torch.int32)
    for i in range(grid.shape[2]):
        for j in range(grid.shape[3]):
            block = dense[:, :, i * block_size[0] :, j * block_size[1] :][:, :, : block_size[0], : block_size[1]]
            grid[:, :, i, j] = block.flatten(2).any(2).int() + block.flatten(2).all(2).int()
    return grid


def classes_in(lists: BlockSparseTensors, columns: int) -> Tensor:
    """The same grid read off the lists, entry by entry; fails on an entry listed twice or out of order."""
    B, H, rows = lists.mask_block_cnt.shape
    grid = torch.zeros(B, H, rows, columns, dtype=torch.int32)
    for kind, counts, index in ((1, *lists[:2]), (2, *lists[2:])):
        assert counts.dtype == index.dtype == torch.int32
        for b in range(B):
            for h in range(H):
                for row in range(rows):
                    entries = index[b, h, row, : counts[b, h, row]].tolist()
                    assert entries == sorted(set(entries))
                    for j in entries:
                        assert grid[b, h, row, j] == 0
                        grid[b, h, row, j] = kind
    return grid


class RandomGraph:
    """A random program over b, h, q_idx, kv_idx and a fixed set of captured tensors."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.build = Builder()
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(300, generator=generator)
        noise[self.random.randrange(300)] = float("nan")
        noise[self.random.randrange(300)] = float("inf")
        self.captures = [
            torch.sort(torch.randint(0, 6, (260,), generator=generator)).values,
            torch.randint(-40, 300, (3, 250), generator=generator, dtype=torch.int32),
            noise,
            torch.rand(70, 90, generator=generator) > 0.3,
            torch.tensor(self.random.randrange(200)),
            torch.randn(4, dtype=torch.float64, generator=generator),
        ]
        self.dtypes = [I64, I32, F, BOOL, I64, F]

    def mask(self, depth: int = 4) -> Node:
        pick = self.random.random()
        if depth <= 0 or pick < 0.55:
            return self._comparison(depth - 1)
        if pick < 0.62:
            return self.build.unary("not", self.mask(depth - 1))
        if pick < 0.68:
            return self.build.where(self.mask(depth - 2), self.mask(depth - 2), self.mask(depth - 2))
        if pick < 0.74:
            return self.build.load(3, BOOL, (self.integer(depth - 2), self.integer(depth - 2)))
        return self.build.arith(self.random.choice(("and", "or", "xor")), self.mask(depth - 1), self.mask(depth - 1))

    def _comparison(self, depth: int) -> Node:
        op = self.random.choice(COMPARE)
        if self.random.random() < 0.3:
            return self.build.compare(op, self.real(depth), self.real(depth))
        return self.build.compare(op, self.integer(depth), self.integer(depth))

    def integer(self, depth: int) -> Node:
        build, choose = self.build, self.random.choice
        kind = "leaf" if depth <= 0 else choose(("leaf", "sum", "sum", "sum", "divide", "minmax", "load", "odd", "mul"))
        if kind == "leaf":
            name = choose(("q_idx", "q_idx", "q_idx", "kv_idx", "kv_idx", "kv_idx", "b", "h", "const"))
            return build.const(self.random.randint(-70, 300)) if name == "const" else build.input(name)
        x = self.integer(depth - 1)
        if kind == "sum":
            return build.arith(choose(("add", "sub", "sub")), x, self.integer(depth - 1))
        if kind == "divide":
            divisor = build.const(choose((2, 3, 7, 16, 50, 64, 128, -5)))
            return build.arith(choose(("fdiv", "mod", "tdiv", "fmod")), x, divisor)
        if kind == "minmax":
            return build.arith(choose(("min", "max")), x, self.integer(depth - 1))
        if kind == "mul":
            return build.arith("mul", x, choose((x, build.const(choose((-3, 2, 17, 2**20))), self.integer(depth - 2))))
        if kind == "odd":
            return self._odd_integer(x, depth)
        slot = choose((0, 1, 4))
        index = {0: (x,), 1: (build.input("b"), x), 4: ()}[slot]
        return build.load(slot, self.dtypes[slot], index)

    def _odd_integer(self, x: Node, depth: int) -> Node:
        build, choose = self.build, self.random.choice
        pick = self.random.randrange(6)
        if pick == 0:
            return build.unary(choose(("abs", "neg", "sign", "not")), x)
        if pick == 1:
            return build.arith(choose(("shl", "shr")), x, build.const(self.random.randint(0, 5)))
        if pick == 2:
            return build.arith(choose(("and", "or", "xor")), x, choose((build.const(31), self.integer(depth - 2))))
        if pick == 3:
            return build.where(self.mask(depth - 2), x, self.integer(depth - 2))
        if pick == 4:
            return build.arith("pow", x, build.const(self.random.randint(0, 4)))
        return build.cast(build.unary(choose(("floor", "round", "ceil", "trunc")), self._tame(depth - 2)), I32)

    def _tame(self, depth: int) -> Node:
        """A float whose conversion to int32 is defined."""
        limits = self.build.const(-1e4), self.build.const(1e4)
        x = self.real(depth)
        x = self.build.where(self.build.compare("eq", x, x), x, self.build.const(0.0))
        return self.build.arith("min", self.build.arith("max", x, limits[0]), limits[1])

    def real(self, depth: int) -> Node:
        build, choose = self.build, self.random.choice
        kind = "leaf" if depth <= 0 else choose(("leaf", "arith", "arith", "unary", "unary", "where", "load", "cast"))
        if kind == "leaf":
            return build.const(choose((0.0, 0.5, -1.5, 3.0, 100.25, 0.1, 1e30, float("inf"))))
        if kind == "cast":
            return build.cast(self.integer(depth - 1), F)
        if kind == "load":
            slot = choose((2, 2, 5))
            return build.load(slot, F, (build.input("h") if slot == 5 else self.integer(depth - 1),))
        if kind == "where":
            return build.where(self.mask(depth - 2), self.real(depth - 1), self.real(depth - 1))
        x = self.real(depth - 1)
        if kind == "arith":
            op = choose(("add", "sub", "mul", "div", "max", "min", "pow", "fdiv", "tdiv", "mod", "fmod"))
            return build.arith(op, x, choose((x, self.real(depth - 1))))
        op = choose((
            "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "rcp", "tanh", "sigmoid", "sin", "cos",
            "tan", "erf", "floor", "ceil", "trunc", "round", "neg", "abs", "sign",
        ))  # fmt: skip
        return build.unary(op, x)


@pytest.fixture(scope="session")
def brute() -> SimpleNamespace:
    names = (evaluate, coordinates, classes_of, classes_in, RandomGraph)
    return SimpleNamespace(**{f.__name__: f for f in names})
