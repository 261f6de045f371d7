"""Launching: back to back, from graphs, streams, threads and other devices, and from disk in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexbwd import flex_attention, mods, warmup
from flexbwd.jit import after_warmup

pytestmark = pytest.mark.gpu

LAUNCHES = 1000
SPIN_CYCLES = 20_000_000  # about 10 ms on the device


class Problem(NamedTuple):
    """query, key, value, and the gradient of the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    mask: Callable[..., Tensor] | None


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def make(seed: int, lengths=(200, 333), heads=(4, 2), dims=(64, 64), mask=mods.causal, device="cuda") -> Problem:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(h: int, s: int, d: int) -> Tensor:
        return torch.randn((2, h, s, d), device=device, generator=generator).bfloat16()

    (q_len, kv_len), (dim, value_dim) = lengths, dims
    leaves = [normal(heads[0], q_len, dim), normal(heads[1], kv_len, dim), normal(heads[1], kv_len, value_dim)]
    return Problem(*(t.requires_grad_() for t in leaves), normal(heads[0], q_len, value_dim), mask)


def attend(p: Problem) -> Results:
    """Forward and backward on the current stream."""
    out, lse = flex_attention(p.query, p.key, p.value, mask_mod=p.mask, return_lse=True, backend="sm90")
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, (p.query, p.key, p.value), p.grad))


def assert_same(got: Results, want: Results) -> None:
    """Bitwise, but for dQ, whose parts are added up in any order."""
    for name, g, w in zip(Results._fields, got, want, strict=True):
        assert not g.isnan().any(), name
        if name == "dq":
            assert (g.float() - w.float()).norm() <= 2e-3 * w.float().norm()
        else:
            assert torch.equal(g, w), name


def poison_free_memory(mib: int = 64) -> None:
    """Leave NaN where the allocator will take results and scratch from."""
    held = [torch.full((size,), torch.nan, device="cuda") for size in [1 << k for k in range(8, 22)] * 2]
    held.append(torch.full((mib << 18,), torch.nan, device="cuda"))
    del held


@pytest.mark.parametrize(
    ("dims", "mask"),
    [((64, 64), mods.causal), ((128, 128), None), ((192, 128), mods.sliding_window(100)), ((256, 256), mods.causal)],
    ids=["d64-causal", "d128-dense", "d192-128-window", "d256-causal"],
)
def test_a_thousand_launches_back_to_back_give_the_same_bits(dims, mask):
    problems = [make(0, dims=dims, mask=mask), make(1, (333, 65), (2, 2), dims, mask)]
    wants = [attend(p) for p in problems]
    bad = torch.zeros(5, dtype=torch.int64, device="cuda")
    for i in range(LAUNCHES // len(problems)):
        if i % 50 == 0:
            poison_free_memory()
        for p, want in zip(problems, wants, strict=True):
            got = attend(p)
            for k, (g, w) in enumerate(zip(got, want, strict=True)):
                tolerance = 2e-3 * w.float().norm() if k == 2 else 0.0
                bad[k] += ~((g.float() - w.float()).nan_to_num(neginf=0).norm() <= tolerance) | g.isnan().any()
    assert bad.tolist() == [0] * 5, dict(zip(Results._fields, bad.tolist(), strict=True))


def test_nothing_waits_for_the_gpu():
    p = make(0)
    attend(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(p)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids="d{0[0]}".format)
@pytest.mark.parametrize("mask", [None, mods.causal], ids=["dense", "causal"])
def test_a_graph_replays_with_new_inputs(mask, dims):
    static = make(0, mask=mask, dims=dims)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            attend(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(static)
    for seed in (1, 2, 1):
        fresh = make(seed, mask=mask, dims=dims)
        with torch.no_grad():
            for old, new in zip(static[:4], fresh[:4], strict=True):
                old.copy_(new)
        for t in captured:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, attend(fresh))


def test_work_goes_to_the_current_stream():
    """The inputs are written late on a side stream; a launch on another one would read what was there before."""
    want, p = attend(make(1)), make(1)
    stream = torch.cuda.Stream()
    kept = [t.detach().clone() for t in p[:4]]
    with torch.no_grad():
        for t in p[:4]:
            t.fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        with torch.no_grad():
            for t, content in zip(p[:4], kept, strict=True):
                t.copy_(content)
        got = attend(p)
    stream.synchronize()
    assert_same(got, want)


def test_two_streams_at_once_do_not_disturb_each_other():
    problems = [make(0, (1000, 1000), (8, 8)), make(1, (900, 1100), (4, 2), (128, 128), None)]
    wants = [attend(p) for p in problems]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Results]] = [[], []]
    for _ in range(50):
        for p, stream, found in zip(problems, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(attend(p))
    torch.cuda.synchronize()
    for found, want in zip(results, wants, strict=True):
        for got in found:
            assert_same(got, want)


def test_two_threads_at_once_do_not_disturb_each_other():
    problems = [make(0, (500, 500)), make(1, (400, 700), (4, 2), (128, 128), None)]
    wants = [attend(p) for p in problems]
    torch.cuda.synchronize()
    results: list[list[Results]] = [[], []]

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                results[index].append(attend(problems[index]))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, want in zip(results, wants, strict=True):
        assert len(found) == 30
        for got in found:
            assert_same(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_device_computes_the_same_whichever_is_current():
    want = [t.cpu() for t in attend(make(1))]
    for index in range(torch.cuda.device_count()):
        source = make(1)
        moved = [t.detach().to(f"cuda:{index}") for t in source[:4]]
        p = Problem(*(t.requires_grad_() for t in moved[:3]), moved[3], source.mask)
        got = attend(p)  # the current device stays 0
        assert torch.cuda.current_device() == 0
        assert {t.device.index for t in got} == {index}
        with torch.cuda.device(index):
            again = attend(p)
        assert_same(Results(*(t.cpu() for t in got)), Results(*want))
        assert_same(Results(*(t.cpu() for t in again)), Results(*want))


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids="d{0[0]}".format)
@pytest.mark.parametrize("options", [{}, {"score_mod": mods.softcap(20.0)}], ids=["plain", "softcap"])
def test_after_a_warmup_nothing_is_compiled(dims, options):
    p = make(0, dims=dims, mask=mods.sliding_window(77))
    warmup(p.query, p.key, p.value, mask_mod=p.mask, backend="sm90", **options)
    with after_warmup("error"):
        out, lse = flex_attention(p.query, p.key, p.value, mask_mod=p.mask, return_lse=True, backend="sm90", **options)
        torch.autograd.grad((out, lse), (p.query, p.key, p.value), (p.grad, torch.ones_like(lse)))
        torch.autograd.grad(flex_attention(p.query, p.key, p.value, mask_mod=p.mask, **options), p.query, p.grad)


NEW_PROCESS = """
import json, sys, time
import torch
q = torch.randn(1, 4, 512, 128, device="cuda").bfloat16().requires_grad_()
g = torch.randn_like(q)
torch.cuda.synchronize()                                        # CUDA's own start is not ours
begin = time.perf_counter()
from flexbwd import flex_attention, mods, warmup
mask = mods.causal if {mask} else None
if {warm}:
    warmup(q, q, q, mask_mod=mask, backend="sm90")
ready = time.perf_counter() - begin
out = flex_attention(q, q, q, mask_mod=mask, backend="sm90")
torch.cuda.synchronize()
forward = time.perf_counter() - begin
out.backward(g)
torch.cuda.synchronize()
both = time.perf_counter() - begin
from flexbwd.jit import events
print(json.dumps(dict(warmup=ready, forward=forward, both=both, dsl="cutlass" in sys.modules,
                      ways=[e.how for e in events], kernels=[(e.name, round(e.seconds, 4)) for e in events],
                      finite=bool(q.grad.isfinite().all()))))
"""


def in_a_new_process(warm: bool, mask: bool) -> dict[str, Any]:
    code = NEW_PROCESS.format(warm=warm, mask=mask)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_new_process_finds_its_kernels_on_disk(tmp_path, monkeypatch):
    """Seconds from importing flexbwd to the end of a forward and backward; cold with and without workers.

    A mask is traced with torch's fake tensors, and the first of them makes torch import Dynamo, about a second: the
    whole call is held to half a second without a mask, and the kernels alone with one.
    """
    found = {}
    for name, folder, warm, mask in (
        ("cold", "a", False, False),
        ("disk", "a", False, False),
        ("cold warmup causal", "b", True, True),
        ("disk warmup causal", "b", True, True),
    ):
        monkeypatch.setenv("FLEXBWD_CACHE_DIR", str(tmp_path / folder))
        found[name] = in_a_new_process(warm, mask)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "jit.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    assert set(found["cold"]["ways"]) == {"compiled"}
    assert found["cold"]["both"] < 8 and found["cold warmup causal"]["both"] < 8
    for name in ("disk", "disk warmup causal"):
        assert set(found[name]["ways"]) == {"loaded"} and not found[name]["dsl"] and found[name]["finite"], name
        assert sum(seconds for _, seconds in found[name]["kernels"]) < 0.5, name
    assert found["disk"]["both"] < 0.5
