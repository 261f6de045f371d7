"""`flexbwd check`: is a mod's backward right, and what will be made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexbwd.cli.console import working
from flexbwd.cli.load import MASK, Loaded, Sizes, load, parse_pair
from flexbwd.errors import OptionError

_TILE = (128, 128)  # (query, key) rows of a kernel tile
BLOCK = 16  # the smallest mask block: the most tile borders in a small problem


def run(spec: str, bwd: str, *, lengths: str, heads: int, batch: int, seed: int) -> int:
    """Print the report on the mod; 0 when all is well, 1 when something differs."""
    if min(heads, batch) < 1:
        raise OptionError(f"{heads=}, {batch=} must be at least 1")
    sizes = Sizes(batch, heads, *parse_pair(lengths, "--lengths"))
    loaded = load(spec, sizes)
    if loaded.kind == MASK:
        if bwd:
            raise OptionError(f"--bwd {bwd}: {spec} is a mask, and masks have no backward")
        return _check_mask(loaded, sizes)
    backward = _backward(loaded, bwd, sizes)
    from flexbwd import check_mod

    with working(f"checking {loaded.name}"):
        report = check_mod(
            loaded.mod, backward, lengths=(sizes.q, sizes.kv), heads=sizes.heads, batch=sizes.batch, seed=seed
        )
    print(report)
    _print_kernel(loaded, sizes)
    return 0 if report.ok else 1


def _print_kernel(loaded: Loaded, sizes: Sizes) -> None:
    """What the Hopper kernels will run of a traced mod, and how often."""
    from flexbwd.modgraph.extents import Extents
    from flexbwd.modgraph.frontend import ModKind, trace
    from flexbwd.modgraph.plan_mods import build_mod_plan
    from flexbwd.modgraph.to_cute.prepare import Lowering, prepare
    from flexbwd.modgraph.to_cute.summary import summary

    is_mask = loaded.kind == MASK
    found, tensors = trace(loaded.mod, ModKind.MASK if is_mask else ModKind.SCORE, device="cpu")
    plan = build_mod_plan(None, None, found) if is_mask else build_mod_plan(found, None, None)
    use = Lowering(Extents(sizes.batch, sizes.heads, sizes.q, sizes.kv), _TILE, backward=not is_mask)
    for line in summary(prepare(plan, found.prologue.run(tensors), use)):
        print(f"kernel, {line}")


def _backward(loaded: Loaded, bwd: str, sizes: Sizes) -> Callable[..., Any] | None:
    """The hand-written backward: the one named, else NAME_bwd beside NAME, else none."""
    if not bwd:
        found = loaded.siblings.get(f"{loaded.name}_bwd")
        return found if callable(found) else None
    if ":" in bwd:
        return load(bwd, sizes, backward=True).mod
    found = loaded.siblings.get(bwd)
    if not callable(found):
        raise OptionError(f"--bwd: there is no function {bwd!r} beside {loaded.name}; name it as file.py:function")
    return found  # type: ignore[no-any-return]


def _check_mask(loaded: Loaded, sizes: Sizes) -> int:
    """Block lists and element mask against the mask_mod itself, evaluated everywhere."""
    from flexbwd import create_block_mask
    from flexbwd.reference import kept_elements

    shape = (sizes.batch, sizes.heads, sizes.q, sizes.kv)
    block_mask = create_block_mask(loaded.mod, *shape, BLOCK_SIZE=BLOCK)
    got = block_mask.element_mask().expand(shape)
    want = kept_elements(shape, loaded.mod)
    wrong = (got != want).nonzero()
    how = "tabulated: the kernels read bits" if block_mask.bits is not None else "traced: the kernels evaluate it"
    print(f"{loaded.name}: mask mod, {how}")
    if block_mask.bits is None:
        _print_kernel(loaded, sizes)
    print(f"{100 * float(want.float().mean()):.1f} % of elements kept, {block_mask.sparsity():.1f} % of tiles skipped")
    dead = int((~want.any(-1)).sum())
    if dead:
        print(f"{dead} of {want[..., 0].numel()} rows keep nothing: their output is 0 and their LSE -inf")
    if len(wrong):
        b, h, i, j = wrong[0].tolist()
        print(f"WRONG at {len(wrong)} elements, first {b=} {h=} q_idx={i} kv_idx={j}: got {bool(got[b, h, i, j])}")
        return 1
    print(f"ok: every element of {sizes.batch} x {sizes.heads} x {sizes.q} x {sizes.kv} agrees with the mask mod")
    return 0
