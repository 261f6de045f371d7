"""flexbwd: attention with programmable scores and masks, forward and backward."""

from pathlib import Path as _Path

_source_root = _Path(__file__).resolve().parent.parent
if (_source_root / "mods" / "__init__.py").exists() and (_source_root / "pyproject.toml").exists():
    __path__.append(str(_source_root))  # a plain source tree: flexbwd.mods is ../mods, flexbwd.sparsity is ../sparsity
