"""One example of every error and warning, raised for real while the page is built."""

from __future__ import annotations

import inspect
import re
import textwrap
import warnings
from typing import Any

from flexbwd import errors

PREAMBLE = """\
import torch
from flexbwd import create_block_mask, flex_attention, mods

q = k = v = torch.randn(1, 2, 64, 16)
"""

EXAMPLES: dict[str, str] = {
    "ShapeError": "flex_attention(q, k[..., :8], v)",
    "DtypeError": "flex_attention(q, k.bfloat16(), v)",
    "DeviceError": 'flex_attention(q, k.to("meta"), v)',
    "MaskError": """\
        block_mask = create_block_mask(mods.causal, None, None, 128, 128)
        flex_attention(q, k, v, block_mask=block_mask)""",
    "OptionError": 'flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})',
    "ConfigError": "mods.softcap(0.0)",
    "UnsupportedError": "flex_attention(q.to_sparse(), k, v)",
    "CompileError": """\
        from flexbwd.jit.compile import compile_now

        compile_now(lambda: (None, ()), name="a kernel that is none")""",
    "CompileAfterWarmupError": """\
        from flexbwd.jit import after_warmup
        from flexbwd.jit.compile import kernel_of

        with after_warmup():
            kernel_of("a new configuration", "flexbwd.sm90.delta:build_delta").ready()""",
    "ModSignatureError": """\
        def bias(score, q_idx, kv_idx):
            return score + (kv_idx - q_idx)

        flex_attention(q, k, v, score_mod=bias)""",
    "ModDataDependentError": """\
        def bias(score, b, h, q_idx, kv_idx):
            if kv_idx > q_idx:
                return score - 1
            return score

        flex_attention(q, k, v, score_mod=bias)""",
    "ModUnsupportedOpError": """\
        def bias(score, b, h, q_idx, kv_idx):
            return torch.lgamma(score)

        flex_attention(q, k, v, score_mod=bias)""",
    "ModShapeError": """\
        table = torch.randn(64, 3)

        def bias(score, b, h, q_idx, kv_idx):
            return score + table[kv_idx]

        flex_attention(q, k, v, score_mod=bias)""",
    "ModMutationError": """\
        def bias(score, b, h, q_idx, kv_idx):
            score += kv_idx
            return score

        flex_attention(q, k, v, score_mod=bias)""",
    "ModRandomError": """\
        def drop(score, b, h, q_idx, kv_idx):
            return torch.where(torch.rand(()) < 0.1, -torch.inf, score)

        flex_attention(q, k, v, score_mod=drop)""",
    "ModDtypeError": """\
        def mask(b, h, q_idx, kv_idx):
            return q_idx - kv_idx

        flex_attention(q, k, v, mask_mod=mask)""",
    "ModCaptureError": """\
        reach = torch.tensor([4.0, 8.0], requires_grad=True)

        def mask(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < reach[h]

        flex_attention(q, k, v, mask_mod=mask)""",
    "ModBackwardError": """\
        def square(score, b, h, q_idx, kv_idx):
            return score * score

        def square_bwd(grad, score, b, h, q_idx, kv_idx):
            return 2 * score * grad + 1

        flex_attention(q, k, v, score_mod=square, score_mod_bwd=square_bwd)""",
    "ModBoundsError": """\
        slopes = torch.randn(2)

        def bias(score, b, h, q_idx, kv_idx):
            return score + slopes[2]

        flex_attention(q, k, v, score_mod=bias)""",
    "ModTraceError": """\
        def bias(score, b, h, q_idx, kv_idx):
            return score * slope

        flex_attention(q, k, v, score_mod=bias)""",
    "ModDtypeWarning": """\
        slopes = torch.randn(2, dtype=torch.float64)

        def bias(score, b, h, q_idx, kv_idx):
            return score + slopes[h]

        flex_attention(q, k, v, score_mod=bias)""",
    "BackendNotice": """\
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():  # for want of a GPU: a CUDA tensor of a dtype that the Hopper kernels do not take
            x = torch.empty(1, 2, 64, 16, device="cuda")
            flex_attention(x, x, x)""",
    "CacheNotice": """\
        from pathlib import Path

        from flexbwd.jit.cache import Cache

        Cache.under(Path("/dev/null/kernels"))  # FLEXBWD_CACHE_DIR=/dev/null/kernels""",
    "CompileNotice": """\
        from flexbwd.jit import after_warmup
        from flexbwd.jit.compile import kernel_of

        with after_warmup("warn"):
            kernel_of("a new configuration", "flexbwd.sm90.delta:build_delta").ready()""",
}
NOT_RAISED = ("FlexError", "ModError", "ModOverflowWarning")  # two bases, and a warning that nothing gives yet


def classes() -> dict[str, type]:
    """Every exception and warning that flexbwd raises itself."""
    found = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    found = {name: kind for name, kind in found.items() if kind.__module__ == errors.__name__}
    return {name: kind for name, kind in found.items() if name not in NOT_RAISED}


def source(name: str) -> str:
    """The example's code."""
    return textwrap.dedent(EXAMPLES[name])


def raised(name: str) -> BaseException:
    """What the example raises, or warns of."""
    scope: dict[str, Any] = {}
    exec(PREAMBLE, scope)
    code = compile(source(name), "example.py", "exec")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(code, scope)
    except (errors.FlexError, UserWarning) as error:
        return error
    raise AssertionError(f"the example of {name} raises nothing")


def message(name: str) -> str:
    """The example's message; fails when it raises another class."""
    error = raised(name)
    if type(error) is not classes()[name]:
        raise AssertionError(f"the example of {name} raises {type(error).__name__}: {error}")
    return str(error)


def markdown() -> str:
    """A section for each class: meaning, example, message."""
    return "\n".join(_section(name, kind) for name, kind in classes().items())


def _section(name: str, kind: type) -> str:
    meaning, _, _ = (inspect.getdoc(kind) or "").partition("\n\n")
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
    code, told = source(name), re.sub(r"\s+", " ", message(name))
    lines = textwrap.wrap(told, 100, break_long_words=False, break_on_hyphens=False)
    parts = [f"## {name}", "", f"{meaning} Derives from {bases}.", "", "```python", code, "```", ""]
    return "\n".join([*parts, "```text", *lines, "```", ""])
