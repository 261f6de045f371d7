"""Every error that a user's mistake can raise.

Each message names the argument, its value, the rule it breaks and the remedy. A class also derives from the builtin
exception that generic code would expect (`ValueError`, `TypeError`, `NotImplementedError`).
"""

from __future__ import annotations


class FlexError(Exception):
    """Base of all flexbwd errors."""


class ShapeError(FlexError, ValueError):
    """A tensor's shape, or the relation of two shapes, breaks a rule."""


class DtypeError(FlexError, TypeError):
    """A tensor's dtype is not supported, or two dtypes differ where they must not."""


class DeviceError(FlexError, ValueError):
    """Tensors lie on different devices, or on one that no backend serves."""


class MaskError(FlexError, ValueError):
    """A block mask does not fit its use: lengths, heads, batch, lists or mask_mod disagree."""


class OptionError(FlexError, ValueError):
    """An option is unknown or its value is not allowed."""


class ConfigError(FlexError, ValueError):
    """A configuration contradicts itself."""


class UnsupportedError(FlexError, NotImplementedError):
    """A legal request that flexbwd does not serve; the message says what to use instead."""


class CompileError(FlexError, RuntimeError):
    """A kernel cannot be compiled: a defect of flexbwd or of its compiler; the compiler's error is chained."""


class CompileAfterWarmupError(FlexError, RuntimeError):
    """A kernel would be compiled where `after_warmup` or FLEXBWD_COMPILE_ALARM=error forbids it."""


class ModError(FlexError, ValueError):
    """A score_mod, score_mod_bwd or mask_mod cannot be compiled.

    Attributes:
        mod: the function's name.  where: `file:line` in the user's source, or "".
        op: the operation at fault, or "".  remedy: what to write instead.
    """

    def __init__(self, problem: str, *, mod: str = "", where: str = "", op: str = "", remedy: str = ""):
        self.problem, self.mod, self.where, self.op, self.remedy = problem, mod, where, op, remedy
        head = f"{mod or 'mod'}" + (f" ({where})" if where else "")
        super().__init__(f"{head}: {problem}" + (f". {remedy}" if remedy else ""))


class ModSignatureError(ModError):
    """The callable takes other arguments, or returns something else, than a mod does."""


class ModDataDependentError(ModError):
    """Python control flow or a Python number was asked of a value known only inside the kernel."""


class ModUnsupportedOpError(ModError):
    """An operation outside the table of supported ones."""


class ModShapeError(ModError):
    """A value that depends on an index is not a scalar."""


class ModMutationError(ModError):
    """The mod writes to one of its arguments or to a captured tensor."""


class ModRandomError(ModError):
    """The mod draws random numbers, or gives another graph each time it is traced."""


class ModDtypeError(ModError):
    """The mod's result, or a value inside it, has a dtype that has no meaning there."""


class ModCaptureError(ModError):
    """A captured tensor cannot be used: device, layout, or a gradient that cannot flow."""


class ModBackwardError(ModError):
    """A hand-written score_mod_bwd is not linear in grad, or cannot replace the derived one."""


class ModBoundsError(ModError):
    """An index into a captured tensor is provably outside it."""


class ModTraceError(ModError):
    """The user's code raised while it was traced; the original error is chained."""


class ModDtypeWarning(UserWarning):
    """A captured tensor is computed in lower precision than it is stored in."""


class ModOverflowWarning(UserWarning):
    """An int32 expression inside a mod cannot be proved free of overflow."""


class BackendNotice(UserWarning):
    """A call runs on another backend than its device suggests."""


class CacheNotice(UserWarning):
    """The kernel cache on disk cannot be used."""


class CompileNotice(UserWarning):
    """A kernel is compiled after warm-up."""
