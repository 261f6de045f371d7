"""Level 4: the data flow of the GPU kernel, with its rounding, emulated.

The idea: hold the scores with keys as rows. Then P and dS are already where the next product wants its operand.

A warpgroup (128 threads) multiplies 64 rows at a time (wgmma). Its result lies in registers, in a fixed pattern; the
left operand of a product may come from registers, too, in a fixed pattern. `main` shows that the patterns are the same.
So with the *swapped* score  Sᵀ = K·Qᵀ  (keys × queries):

    dV += Pᵀ·dO     left operand Pᵀ: it is what the registers hold, rounded to 16 bits
    dK += dSᵀ·Q     left operand dSᵀ: likewise
    dQ  = dS·K      needs dS with queries as rows: the one thing that takes the way through shared memory

Precision: inputs 16-bit; every product accumulates in fp32; P and dS are fp32 until they are rounded to 16 bits as
operands; exp is taken in base 2, with log2(e) folded into the scale; dQ is added up in fp32, tile by tile, and dK, dV
in registers; each gradient is rounded once, at the end.
"""

from __future__ import annotations

import math

import torch
from common import Head, causal, check, errors, head, oracle
from torch import Tensor

KEYS, QUERIES = 128, 64  # of a tile: two warpgroups of 64 key rows
BF16 = torch.bfloat16
LOG2_E = math.log2(math.e)


def product(a: Tensor, b: Tensor) -> Tensor:
    """A tensor-core product: 16-bit operands, exact products, fp32 sum."""
    assert a.dtype == b.dtype == BF16
    return a.float() @ b.float()


def backward(x: Head, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """Gradients in bf16, from bf16 inputs; `lse` is fp32, natural log. Lengths are multiples of the tile."""
    # the delta kernel: everything of a row that needs no scores
    delta = (x.grad_out.float() * out.float()).sum(-1)
    lse_log2 = lse * LOG2_E
    dq_acc = torch.zeros(x.query.shape)  # fp32, in global memory: zeroed by the delta kernel
    dk, dv = torch.empty_like(x.key), torch.empty_like(x.value)

    for n in range(0, len(x.key), KEYS):  # the backward kernel: a CTA each
        k, v = x.key[n : n + KEYS], x.value[n : n + KEYS]  # loaded once
        acc_dk, acc_dv = torch.zeros(k.shape), torch.zeros(v.shape)  # fp32 registers
        j = torch.arange(n, n + KEYS)[:, None]
        for m in range(n // QUERIES * QUERIES, len(x.query), QUERIES):  # causal: from the diagonal on
            rows = slice(m, m + QUERIES)
            q, do = x.query[rows], x.grad_out[rows]
            # 1, 2: S and dP, keys as rows
            acc_s = product(k, q.mT)
            acc_dp = product(v, do.mT)
            # 3: P and dS, in place; a tile below the diagonal is compared with nothing
            s = acc_s * (x.scale * LOG2_E) - lse_log2[rows][None]
            if m < n + KEYS:
                s = s.masked_fill(~causal(torch.arange(m, m + QUERIES)[None], j), -torch.inf)
            p = s.exp2()
            ds = p * (acc_dp - delta[rows][None])
            p16, ds16 = p.to(BF16), ds.to(BF16)
            # 4, 6: straight from registers
            acc_dv += product(p16, do)
            acc_dk += product(ds16, q)
            # 5: dS through shared memory, transposed; a bulk reduction adds the tile in fp32
            dq_acc[rows] += product(ds16.mT, k)
        dk[n : n + KEYS] = (acc_dk * x.scale).to(BF16)
        dv[n : n + KEYS] = acc_dv.to(BF16)
    # the convert kernel
    return {"dq": (dq_acc * x.scale).to(BF16), "dk": dk, "dv": dv}


def eager(x: Head, keep: Tensor) -> dict[str, Tensor]:
    """The same gradients by torch in bf16 throughout: what rounding everywhere costs."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    out = (x.scale * q @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1) @ v
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), x.grad_out), strict=True))


# -- the register patterns --------------------------------------------------------------------------
def result_at(thread: int, register: int) -> tuple[int, int]:
    """(row, column) of a 64 × N result that `thread` holds in its `register`-th fp32 register."""
    column_in_pair, row_half, group = register % 2, register // 2 % 2, register // 4
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * row_half
    return row, 8 * group + 2 * (thread % 4) + column_in_pair


def operand_at(thread: int, register: int) -> tuple[int, int]:
    """(row, column) of a 64 × K left operand in registers: 8 elements for each step of 16 columns."""
    step, inside = divmod(register, 8)
    column_in_pair, row_half, column_half = inside % 2, inside // 2 % 2, inside // 4
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * row_half
    return row, 16 * step + 8 * column_half + 2 * (thread % 4) + column_in_pair


def patterns_agree(columns: int) -> bool:
    """Whether a 64 × `columns` result can be used as an operand register by register, and covers the tile once."""
    held = [(t, r) for t in range(128) for r in range(64 * columns // 128)]
    places = [result_at(t, r) for t, r in held]
    assert sorted(places) == [(i, j) for i in range(64) for j in range(columns)]
    return all(result_at(t, r) == operand_at(t, r) for t, r in held)


def main() -> None:
    length = 512
    x = head(length, length, 64, BF16)
    keep = causal(torch.arange(length)[:, None], torch.arange(length)[None])
    want = oracle(x, keep)
    score = (x.scale * x.query.double() @ x.key.double().mT).masked_fill(~keep, -torch.inf)
    got = backward(x, want["out"].to(BF16), score.logsumexp(-1).float())
    print(f"a result is an operand, register by register: {patterns_agree(QUERIES)}")
    assert patterns_agree(QUERIES)
    rough = errors(eager(x, keep), want)
    print("all in bf16: " + ", ".join(f"{name} {e:.1e}" for name, e in rough.items()))
    check(got, want, at_most=max(rough.values()))


if __name__ == "__main__":
    main()
