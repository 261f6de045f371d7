"""What the backends get of a set of mods: graphs, Jacobian factors, and where captured tensors are read.

Meaning (design.md §1), for one element:

    s' = forward(score, b, h, q_idx, kv_idx, captures)
    keep = score_keep ∧ (block is full ∨ mask)
    ds = ds' · j_score          d(capture of load l) += ds' · l.jacobian   at index l.node.args, kept elements only
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .ir import Builder, Node


class JClass(enum.Enum):
    """What the score's Jacobian ∂s'/∂s looks like."""

    ONE = "one"  # additive mods: no backward code at all
    CONST = "const"  # a number, or a value of captures / b / h only
    LINEAR = "linear"  # depends on indices or captures but not on the score
    NONLINEAR = "nonlinear"  # depends on the score


class Keep(enum.Enum):
    """What the backward must keep per element between the score and the gradient."""

    P = "P"  # j_score is one or free to recompute from coordinates
    P_J = "P*J"  # the product is enough: every load's Jacobian is j_score times something free of the score
    P_AND_J = "P+J"  # captured gradients need P itself beside J
    SCORE = "S"  # a load's Jacobian needs the pre-mod score


class LoadClass(enum.Enum):
    """Which coordinates a load's index depends on."""

    UNIFORM = "uniform"  # neither q_idx nor kv_idx
    ROW = "row"  # q_idx only
    COL = "col"  # kv_idx only
    TOEPLITZ = "toeplitz"  # q_idx and kv_idx only through one difference q_idx - kv_idx
    TILE = "tile"  # one index affine in q_idx, another in kv_idx
    GATHER = "gather"  # anything else


class Guard(enum.Enum):
    """What an index needs so that no lane, masked or padded ones included, leaves the tensor."""

    NONE = "none"
    WRAP = "wrap"  # may be negative, Python's meaning
    CLAMP = "clamp"


class Band(NamedTuple):
    """Keeps lo <= q_idx - kv_idx <= hi; None is no limit. Causal is (0, None), a causal window of w keys (0, w - 1)."""

    lo: int | None
    hi: int | None


@dataclass(frozen=True)
class CaptureSpec:
    """Static facts of one captured tensor, after the prologue."""

    name: str  # as the user knows it: "slopes", "self.bias", "exp(slopes)"
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, eq=False)
class LoadSite:
    node: Node  # the `load`; node.attr is the capture slot, node.args the index
    kind: LoadClass
    jacobian: Node | None  # ∂s'/∂(loaded value); None where no gradient flows

    @property
    def slot(self) -> int:
        return int(self.node.attr)  # type: ignore[call-overload]


@dataclass(frozen=True, eq=False)
class ModPlan:
    """Everything a backend needs of score_mod, score_mod_bwd and mask_mod.

    All nodes belong to `builder`. Load slots index `captures`: score_mod's, then score_mod_bwd's, then mask_mod's.
    """

    builder: Builder
    forward: Node  # s'; is the input `score` when there is no score_mod
    mask: Node | None  # mask_mod, evaluated on partial blocks; None: every listed element is kept
    score_keep: Node | None  # split off score_mod's -inf branches: evaluated on every listed block
    j_score: Node  # ∂s'/∂score
    j_class: JClass
    keep: Keep
    loads: tuple[LoadSite, ...]  # loads of `forward` and `j_score`; mask loads are not differentiable
    captures: tuple[CaptureSpec, ...]
    hash: str  # canonical: equal for equal expressions and capture facts
    names: tuple[str, str] = ("", "")  # (score_mod, mask_mod), for messages

    @property
    def is_identity(self) -> bool:
        """No score_mod at all."""
        return self.forward.op == "in"
