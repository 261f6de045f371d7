"""A mask_mod called as plain Python: vectorised where torch.vmap can, element by element where it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexbwd.errors import MaskError

Array = np.ndarray

#: Most elements that a callable is called for one by one (some seconds up to a minute).
MAX_CALLS = 2**22


class EagerMask:
    """Evaluates `mask_mod(b, h, q_idx, kv_idx)` on a grid of coordinates.

    Args:
        device: of the coordinates that a vectorised call sees.
    Attributes:
        total: elements the whole tabulation visits; bounds the element-wise way.
    """

    def __init__(self, mask_mod: Callable, device: torch.device | str):
        self.mask_mod = mask_mod
        self.device = device
        self.name = getattr(mask_mod, "__name__", type(mask_mod).__name__)
        self.total = 0
        self.vectorised = True

    def reads(self) -> tuple[bool, bool]:
        """Whether the mask reads (batch, head).

        A vectorised call tells: a result that does not depend on a mapped argument comes back expanded. Where
        there is none, one plain call at element (0, 0) tells what it touched.
        """
        return self._vectorised_reads() or self._touched()

    def differs(self, B: int | None, H: int | None) -> tuple[bool, bool]:
        """Whether the mask may differ along (batch, head). MaskError where it does along one given as None."""
        certain = self._vectorised_reads()
        reads = certain or self._touched()
        for argument, value, read in (("B", B, reads[0]), ("H", H, reads[1])):
            if value is None and read:
                raise MaskError(
                    f"{argument}=None broadcasts one mask, but mask_mod {self.name} reads `{argument.lower()}`: "
                    f"pass {argument}=the number of {'batch entries' if argument == 'B' else 'query heads'}"
                )
        # what one plain call did not touch, another may
        return certain or (B is not None, H is not None)

    def _vectorised_reads(self) -> tuple[bool, bool] | None:
        two = torch.zeros(2, dtype=torch.int32, device=self.device)
        call = self.mask_mod
        for dim in (3, 2, 1, 0):
            call = torch.vmap(call, in_dims=tuple(0 if d == dim else None for d in range(4)))
        try:
            with torch.no_grad():
                found = call(two, two, two, two)
        except Exception:  # reported where the elements are evaluated
            return None
        return (found.stride(0) != 0, found.stride(1) != 0) if isinstance(found, Tensor) else None

    def _touched(self) -> tuple[bool, bool]:
        watched = [torch.zeros((), dtype=torch.int32, device="cpu").as_subclass(_Watched) for _ in range(2)]
        plain = torch.zeros((), dtype=torch.int32, device="cpu")
        with contextlib.suppress(Exception), torch.no_grad():  # as above
            self.mask_mod(*watched, plain, plain)
        return watched[0].used, watched[1].used

    def __call__(self, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """bool `[pairs, q, kv]` for the (batch, head) pairs `b, h` and the given coordinates."""
        shape = (len(b), len(q_idx), len(kv_idx))
        if 0 in shape:
            return np.zeros(shape, dtype=bool)
        with torch.no_grad():
            if self.vectorised:
                try:
                    return self._vectorised(b, h, q_idx, kv_idx)
                except MaskError:
                    raise
                except Exception as error:
                    self._refuse_random(error)
                    self.vectorised = False
            return self._one_by_one(b, h, q_idx, kv_idx)

    def _vectorised(self, *coordinates: Array) -> Array:
        call = self.mask_mod
        for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, None, None)):
            call = torch.vmap(call, in_dims=dims)
        found = call(*(torch.from_numpy(c.astype(np.int32)).to(self.device) for c in coordinates))
        self._check_dtype(found)
        return found.cpu().numpy()

    def _one_by_one(self, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        if self.total > MAX_CALLS:
            raise MaskError(
                f"mask_mod {self.name} cannot be vectorised (Python control flow or .item() on an index?) and would be "
                f"called {self.total} times, more than {MAX_CALLS}: write it with torch ops such as torch.where, & and "
                "|, or pass a dense bool tensor"
            )
        rows, columns = (torch.from_numpy(x.astype(np.int32)).unbind() for x in (q_idx, kv_idx))
        out = np.empty((len(b), len(rows), len(columns)), dtype=bool)
        for pair in range(len(b)):
            at = [torch.tensor(int(x[pair]), dtype=torch.int32, device="cpu") for x in (b, h)]
            for i, row in enumerate(rows):
                out[pair, i] = [self._call(*at, row, column) for column in columns]
        return out

    def _call(self, *coordinates: Tensor) -> bool:
        try:
            found = self.mask_mod(*coordinates)
        except Exception as error:
            where = ", ".join(f"{n}={int(c)}" for n, c in zip(("b", "h", "q_idx", "kv_idx"), coordinates, strict=True))
            raise MaskError(
                f"mask_mod {self.name} raised {type(error).__name__} at {where}: {error}; it must yield a bool for "
                "every element of the mask"
            ) from error
        if found is True or found is False:
            return found
        self._check_dtype(found)
        return bool(found)

    def _check_dtype(self, found: Any) -> None:
        if not isinstance(found, Tensor) or found.dtype is not torch.bool:
            what = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise MaskError(f"mask_mod {self.name} yields {what}: it must yield a bool; compare, or test != 0")

    def _refuse_random(self, error: Exception) -> None:
        if "randomness" in str(error):
            raise MaskError(
                f"mask_mod {self.name} draws random numbers, so it means another mask each time it is evaluated: "
                "precompute a bool tensor and capture it, or pass it as the mask"
            ) from error


class _Watched(Tensor):
    """A tensor that remembers having been an operand."""

    used = False

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        _mark(args)
        _mark(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _mark(operands: Any) -> None:
    if isinstance(operands, _Watched):
        operands.used = True
    elif isinstance(operands, (tuple, list)):
        for operand in operands:
            _mark(operand)
    elif isinstance(operands, dict):
        _mark(list(operands.values()))
