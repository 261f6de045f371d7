"""Jit functions that cannot be compiled; the DSL reads their annotations as objects, so they are not deferred here."""

from cutlass import cute

from flexbwd.errors import ConfigError


@cute.jit
def leaves_early(x: cute.Tensor) -> None:
    """A return inside run-time control flow, which the DSL refuses."""
    if x[0] > 0:
        return


@cute.jit
def refuses(x: cute.Tensor) -> None:
    """Finds its configuration wrong while it is traced."""
    raise ConfigError("tile_n=3 must be even; change it")
