"""flexbwd: attention with programmable scores and masks, forward and backward.

    from flexbwd import flex_attention
    out = flex_attention(q, k, v, score_mod=..., mask_mod=...)

The zoo of mods is `flexbwd.mods`, block masks are `flexbwd.sparsity`.
"""

from pathlib import Path as _Path

_source_root = _Path(__file__).resolve().parent.parent
if (_source_root / "mods" / "__init__.py").exists() and (_source_root / "pyproject.toml").exists():
    __path__.append(str(_source_root))  # a plain source tree: flexbwd.mods is ../mods, flexbwd.sparsity is ../sparsity

from torch.nn.attention.flex_attention import AuxOutput, AuxRequest  # noqa: E402

from flexbwd import errors  # noqa: E402
from flexbwd.api import flex_attention, warmup  # noqa: E402
from flexbwd.modgraph.report import ModReport, check_mod  # noqa: E402
from flexbwd.sparsity import BlockMask, and_masks, create_block_mask, noop_mask, not_mask, or_masks  # noqa: E402

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "ModReport",
    "and_masks",
    "check_mod",
    "create_block_mask",
    "errors",
    "flex_attention",
    "noop_mask",
    "not_mask",
    "or_masks",
    "warmup",
]
__version__ = "0.1.0"
