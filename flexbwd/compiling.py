"""flex_attention inside torch.compile: one higher-order operator that carries the mods as a subgraph.

Dynamo traces mods like any other code: `call` hands it a `body` that runs every mod once on dummy coordinates, and
Dynamo turns it into a graph, lifting whatever the mods capture (closures, module attributes, tensors made inside the
compiled region, Python numbers) into operands of `flexbwd_call`, with the guards that belong to them. The operator is
not one for the compiler to keep: when AOTAutograd runs it, the graph's mods go through the ordinary tracer and planner,
and plain `flexbwd::block_lists` and `flexbwd::forward` calls are what remains.

`body` marks each of its arguments with `flexbwd::mark`, because Dynamo reorders and merges operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._higher_order_ops.base_hop import BaseHOP
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.utils._python_dispatch import _disable_current_modes

from flexbwd import backends, ops
from flexbwd.errors import MaskError
from flexbwd.modgraph.frontend import ModKind, TracedMod, trace, warn_narrowing
from flexbwd.plan import lookup
from flexbwd.planning import Numerics, check_lengths, link, lists_for
from flexbwd.problem import Problem, stat_dtype
from flexbwd.sparsity import validate_for
from flexbwd.sparsity.tensors import BlockBits, BlockLists, BlockSparseTensors, IndexBase

_lib = torch.library.Library("flexbwd", "FRAGMENT")
_lib.define("mark(Tensor x, str role) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_lib.impl("mark", lambda x, role: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("flexbwd::mark", lambda x, role: torch.empty_like(x), lib=_lib)
_lib.define("output_like(Tensor query, Tensor value) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_lib.impl("output_like", ops.output_like, "CompositeExplicitAutograd")
torch.library.register_fake("flexbwd::output_like", ops.output_like, lib=_lib)

_KINDS = {"score_mod": ModKind.SCORE, "score_mod_bwd": ModKind.SCORE_BWD, "mask_mod": ModKind.MASK}
_ARGUMENTS = {
    ModKind.SCORE: ("score", "b", "h", "q_idx", "kv_idx"),
    ModKind.SCORE_BWD: ("grad", "score", "b", "h", "q_idx", "kv_idx"),
    ModKind.MASK: ("b", "h", "q_idx", "kv_idx"),
}
_LISTS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")


# -- traced by Dynamo --------------------------------------------------------------------------------------------------
def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Any,
    masks: tuple[Any, dict[str, Tensor], tuple[int, int]],
    backend: str = "cpu",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of checked BHSD operands, as one node of Dynamo's graph."""
    mask_mod, named, block_size = masks
    mods = {"score_mod": options.score_mod, "score_mod_bwd": options.score_mod_bwd, "mask_mod": mask_mod}
    present = [name for name, mod in mods.items() if mod is not None]
    base = options.index_base
    if base is not None:
        named = {**named, **{n: t for n, t in (("q_base", base.q_base), ("kv_base", base.kv_base)) if t is not None}}
    # one-element vectors: Dynamo would turn an index by a 0-d tensor into a data-dependent integer
    index = torch.zeros(1, dtype=torch.int32, device=query.device)
    wide = torch.zeros(1, dtype=stat_dtype(query.dtype), device=query.device)
    coordinates = {"score": wide, "grad": wide + 1, "b": index, "h": index + 1, "q_idx": index + 2, "kv_idx": index + 3}
    inputs = {"query": query, "key": key, "value": value, **coordinates, **named}
    roles = tuple(inputs)

    def body(*tensors: Tensor) -> tuple[Tensor, ...]:
        marked = {r: torch.ops.flexbwd.mark(t, r) for r, t in zip(roles, tensors)}  # noqa: B905 (Dynamo)
        found = [mods[name](*[marked[a] for a in _ARGUMENTS[_KINDS[name]]]) for name in present]
        out, lse = torch.ops.flexbwd.output_like(marked["query"], marked["value"])
        return (out, lse, torch.empty_like(lse), *marked.values(), *found)

    outputs = flexbwd_call(
        body,
        *inputs.values(),
        mods=tuple(present),
        block_size=tuple(block_size),
        precision=options.precision,
        backend=backend,
        deterministic=deterministic,
        tile_elements=(options.kernel_options or {}).get("cpu_tile_elements", -1),
        offsets=(0, 0) if base is None else (base.b_off, base.h_off),
        based=base is not None,
        scale=-1.0 if options.scale is None else options.scale,
        scaled=options.scale is not None,
    )
    return outputs[0], outputs[1], outputs[2]


def mask_parts(mask_mod: Any, block_mask: Any) -> tuple[Any, dict[str, Tensor], tuple[int, int]]:
    """The mask_mod to trace, the lists' tensors by role, and the block size."""
    if block_mask is None:
        return mask_mod, {}, (128, 128)
    own = block_mask.mask_mod
    if isinstance(block_mask, TorchBlockMask):
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        to_kv = [getattr(block_mask, n) for n in names]
        to_q = [getattr(block_mask, n.replace("kv", "q")) for n in names]
        bits, size = None, block_mask.BLOCK_SIZE
    else:
        to_kv, to_q = list(block_mask.q_to_kv), list(block_mask.kv_to_q)
        bits, size = block_mask.bits, block_mask.block_size
    if mask_mod is not None and (bits is not None or (own is not None and own is not mask_mod)):
        raise MaskError(
            "mask_mod is given and block_mask has a mask of its own; join them with flexbwd.and_masks first"
        )
    named = {f"q_to_kv.{n}": t for n, t in zip(_LISTS, to_kv, strict=True) if t is not None}
    named |= {f"kv_to_q.{n}": t for n, t in zip(_LISTS, to_q, strict=True) if t is not None}
    if bits is not None:
        named |= {f"bits.{n}": getattr(bits, n) for n in BlockBits._fields}
        return None, named, size
    return (own if mask_mod is None else mask_mod), named, size


def check_fit(block_mask: Any, query: Tensor, key: Tensor) -> None:
    """The block mask was made for these lengths, batch entries and heads; else its lists name blocks outside them."""
    if block_mask is None:
        return
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    if not isinstance(block_mask, TorchBlockMask):
        validate_for(block_mask, batch, heads, q_len, kv_len)
        return
    lead = block_mask.kv_num_blocks.shape[:2]
    if block_mask.seq_lengths != (q_len, kv_len) or lead[0] not in (1, batch) or lead[1] not in (1, heads):
        raise MaskError(
            f"block_mask was made for B, H = {tuple(lead)} and lengths {block_mask.seq_lengths}, but the call has "
            f"{(batch, heads)} and {(q_len, kv_len)}; create one for them with create_block_mask"
        )


class FlexbwdCall(BaseHOP):
    """`flexbwd_call(body, *operands, **static)`: attention whose mods are a subgraph; runs at once where it is met."""

    def __init__(self) -> None:
        super().__init__("flexbwd_call")

    def __call__(self, subgraph: Any, *operands: Any, **static: Any) -> tuple[Tensor, ...]:
        return _run(subgraph, operands, static)


flexbwd_call = FlexbwdCall()


# -- run by AOTAutograd, or by the eager backend -----------------------------------------------------------------------
@dataclass(frozen=True)
class _ModGraph:
    """One mod cut out of the subgraph: takes its coordinates, then the operands it captures."""

    name: str
    kind: ModKind
    module: fx.GraphModule
    captured: tuple[int, ...]  # operands


@dataclass(frozen=True)
class _Parsed:
    """A subgraph taken apart, and the traces of its mods by the facts of what they capture."""

    positions: dict[str, int]  # role -> operand
    outputs: int  # how many values the subgraph returns
    mods: tuple[_ModGraph | None, ...]  # score_mod, score_mod_bwd, mask_mod
    traces: dict[tuple[Any, ...], tuple[tuple[TracedMod, tuple[int, ...]] | None, ...]]


_parsed: WeakKeyDictionary[fx.GraphModule, _Parsed] = WeakKeyDictionary()


def _run(subgraph: fx.GraphModule, operands: Sequence[Any], static: dict[str, Any]) -> tuple[Tensor, ...]:
    parsed = _parsed.get(subgraph)
    if parsed is None:
        parsed = _parsed[subgraph] = _parse(subgraph, static["mods"])
    at = {role: operands[i] for role, i in parsed.positions.items()}
    query, key, value = at["query"], at["key"], at["value"]
    problem = Problem.of(query, key, value, static["scale"] if static["scaled"] else None)
    mods = _traces(parsed, operands, query.device)
    captures: list[Tensor] = []
    for entry in mods:
        if entry is not None:
            traced, where = entry
            warn_narrowing(traced, stat_dtype(query.dtype))
            captures += traced.prologue.run([operands[i] for i in where])
    elements = static["tile_elements"]
    elements = None if elements < 0 else elements
    numerics = Numerics(static["precision"], elements, static["backend"], static["deterministic"])
    linked = link(tuple(e and e[0] for e in mods), tuple(static["block_size"]), numerics)
    base = None
    if static["based"]:
        b_off, h_off = static["offsets"]
        base = IndexBase(b_off, h_off, at.get("q_base"), at.get("kv_base"), tuple(static["block_size"]))
    if base is None:
        check_lengths(linked, tuple(e and e[0] for e in mods), problem)
    plan, blocks = lists_for(linked, _given_lists(at), captures, problem, base, pin=True)
    backends.check(problem, lookup(plan), captures, base)
    fixed = ops.Static.of(blocks, base, plan, problem.scale)
    found = torch.ops.flexbwd.forward(query, key, value, captures, *fixed, True)
    return (*found, *(query.new_empty(0) for _ in range(parsed.outputs - 3)))


def _given_lists(at: dict[str, Tensor]) -> BlockLists | None:
    if "q_to_kv.mask_block_cnt" not in at:
        return None
    both = [BlockSparseTensors(*(at.get(f"{d}.{n}") for n in _LISTS)) for d in ("q_to_kv", "kv_to_q")]  # type: ignore[arg-type]
    bits = BlockBits(*(at[f"bits.{n}"] for n in BlockBits._fields)) if "bits.words" in at else None
    return BlockLists(both[0], both[1], bits)


def _traces(
    parsed: _Parsed, operands: Sequence[Any], device: torch.device
) -> tuple[tuple[TracedMod, tuple[int, ...]] | None, ...]:
    """Each mod's trace and the operands that are its captured tensors, in the prologue's order."""
    used = sorted({i for mod in parsed.mods if mod is not None for i in mod.captured})
    with _disable_current_modes():
        stand_ins = {i: _stand_in(operands[i]) for i in used}
        key = tuple(_facts(x) for x in stand_ins.values())
        found = parsed.traces.get(key)
        if found is None:
            found = parsed.traces[key] = tuple(None if m is None else _trace(m, stand_ins, device) for m in parsed.mods)
    return found


def _trace(mod: _ModGraph, stand_ins: dict[int, Any], device: torch.device) -> tuple[TracedMod, tuple[int, ...]]:
    captured = [stand_ins[i] for i in mod.captured]

    def compiled_mod(*coordinates: Tensor) -> Tensor:
        return mod.module(*coordinates, *captured)  # type: ignore[no-any-return]

    compiled_mod.__name__ = compiled_mod.__qualname__ = mod.name
    traced, tensors = trace(compiled_mod, mod.kind, device=device)
    return traced, tuple(next(i for i, s in stand_ins.items() if s is t) for t in tensors)


def _stand_in(x: Any) -> Any:
    """A real tensor of the same facts, for the tracer to see as a captured tensor; a number is taken at its value."""
    if isinstance(x, Tensor):
        shape, stride = tuple(map(int, x.shape)), tuple(map(int, x.stride()))
        made = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)
    return int(x) if isinstance(x, torch.SymInt) else float(x) if isinstance(x, torch.SymFloat) else x


def _facts(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Tensor):
        return (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
    return (type(x), repr(x))


def _parse(subgraph: fx.GraphModule, present: Sequence[str]) -> _Parsed:
    nodes = list(subgraph.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    mark_ops = (torch.ops.flexbwd.mark, torch.ops.flexbwd.mark.default)
    marks = {n.args[1]: n for n in nodes if n.target in mark_ops}
    positions = {role: inputs.index(mark.args[0]) for role, mark in marks.items()}
    (output,) = (n for n in nodes if n.op == "output")
    results = dict(zip(present, output.args[0][-len(present) :], strict=True)) if present else {}
    mods = tuple(_mod_graph(subgraph, marks, name, results[name]) if name in results else None for name in _KINDS)
    return _Parsed(positions, len(output.args[0]), mods, {})


def _mod_graph(subgraph: fx.GraphModule, marks: dict[str, fx.Node], name: str, result: fx.Node) -> _ModGraph:
    graph, kind = fx.Graph(), _KINDS[name]
    mapped = {marks[a]: graph.placeholder(a) for a in _ARGUMENTS[kind]}
    operands = [n for n in subgraph.graph.nodes if n.op == "placeholder"]
    mapped |= {n: graph.placeholder(f"capture{i}") for i, n in enumerate(operands)}
    for node in subgraph.graph.nodes:
        if node.op != "output" and node not in mapped:
            mapped[node] = _copied(graph, node, mapped, marks["score"])
    graph.output(mapped[result])
    graph.eliminate_dead_code()
    captured = tuple(i for i, n in enumerate(operands) if mapped[n].users)
    for node in operands:
        if not mapped[node].users:
            graph.erase_node(mapped[node])
    return _ModGraph(name, kind, fx.GraphModule(subgraph, graph), captured)


def _copied(graph: fx.Graph, node: fx.Node, mapped: dict[fx.Node, fx.Node], score: fx.Node) -> fx.Node:
    """`node` in the new graph. A Python float that changes comes as a tensor and its `.item()`: here a 0-d capture."""
    number = node.args[0] if node.op == "call_method" and node.target == "item" else None
    if isinstance(number, fx.Node) and number.op == "placeholder":
        return graph.call_method("to", (mapped[number], score.meta["example_value"].dtype))
    return graph.node_copy(node, mapped.__getitem__)
