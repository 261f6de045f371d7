"""Many kernels at once: workers, progress, and what happens when a worker cannot help."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest

from flexbwd.errors import OptionError
from flexbwd.jit import cache, codec, compile, warm
from flexbwd.jit.compile import forget, kernel_of
from flexbwd.sm90.tile import FwdTile
from tests.host.jit.conftest import BUILD, small


def ways(done):
    return sorted(d.how for d in done)


@pytest.fixture
def exported(made, monkeypatch):
    """Compiling in this process gives the stand-in."""
    monkeypatch.setattr(compile, "compile_now", lambda build, name: made)
    return made


TILES = [(FwdTile(d, d), BUILD) for d in (32, 64, 96)]


def test_what_is_in_memory_or_on_disk_is_not_compiled(exported):
    told = []
    assert ways(warm.warm([*TILES, TILES[0]], workers=0, report=told.append)) == ["compiled"] * 3
    assert ways(told) == ["compiled"] * 3
    assert ways(warm.warm(TILES)) == ["memory"] * 3
    forget()
    assert ways(warm.warm(TILES)) == ["loaded"] * 3 and exported.exports == 3


def test_gathered_jobs_are_only_noted(exported):
    with warm.gathering() as jobs:
        assert warm.warm(TILES[:2]) == [] and warm.warm(TILES[2:]) == []
    assert jobs == TILES and exported.exports == 0
    assert ways(warm.warm(jobs, workers=0)) == ["compiled"] * 3


@pytest.mark.parametrize("train", [True, False], ids=["train", "serve"])
def test_warmup_asks_for_the_kernels_of_the_call_and_its_backward(train):
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import flexbwd
    from flexbwd import mods

    with warm.gathering() as jobs, FakeTensorMode():
        q = torch.empty(1, 8, 1000, 64, dtype=torch.bfloat16, device="cuda", requires_grad=train)
        k = torch.empty(1, 2, 1000, 64, dtype=torch.bfloat16, device="cuda", requires_grad=train)
        flexbwd.warmup(q, k, k, mask_mod=mods.sliding_window(100), backend="sm90")
    kinds = [type(config).__name__ for config, _ in jobs]
    assert kinds == ["FwdConfig", *(["BwdConfig", "DeltaConfig", "DeltaConfig", "ConvertConfig"] if train else [])]
    for config, build in jobs:
        assert callable(codec.find(build)) and codec.from_wire(codec.to_wire(config)) == config
        assert warm._request(kernel_of(config, build)) is not None


def test_a_worker_compiles_to_disk_and_this_process_loads(folder):
    """Two real kernels through the worker's own protocol."""
    kernels = [kernel_of(small(64), BUILD), kernel_of(small(128), BUILD)]
    round_ = warm._Round(None)
    round_.feed(deque(kernels), cache.default())
    assert ways(round_.done) == ["worker"] * 2
    with pytest.raises(TypeError):
        kernels[0].run(1)
    forget()
    assert ways(warm.warm([(small(64), BUILD)])) == ["loaded"]


def test_without_the_disk_cache_workers_still_help(monkeypatch):
    """Their kernels go through a folder of this round's own."""
    monkeypatch.setenv("FLEXBWD_CACHE", "0")
    round_ = warm._Round(None)
    with warm.ExitStack() as stack:
        store = warm._shared_store(stack)
        round_.feed(deque([kernel_of(small(64), BUILD)]), store)
    assert ways(round_.done) == ["worker"] and not store.root.exists()


@pytest.mark.parametrize("interpreter", ["", "/bin/false", "/does/not/exist"])
def test_without_a_working_worker_everything_is_compiled_here(exported, monkeypatch, interpreter):
    monkeypatch.setattr(sys, "executable", interpreter)
    done = warm.warm(TILES, workers=2)
    assert ways(done) == ["compiled"] * 3 and exported.exports == 3


def test_a_worker_reports_an_error_and_goes_on():
    bad = json.dumps({"build": "flexbwd.sm90.delta:build_delta", "config": codec.to_wire(FwdTile(64, 64))})
    foreign = json.dumps({"build": "os:system", "config": codec.to_wire("true")})
    with warm._Worker({}) as worker:
        assert "is not part of flexbwd" in worker.ask(foreign)["error"]
        assert worker.ask(bad)["ok"] is False
        assert worker.ask(bad)["ok"] is False


def test_a_kernel_that_cannot_be_compiled_is_an_error_here(monkeypatch):
    def fails(build, name):
        raise ValueError("no")

    monkeypatch.setattr(compile, "compile_now", fails)
    with pytest.raises(ValueError, match="no"):
        warm.warm(TILES, workers=1)


def test_local_builders_are_compiled_here(exported):
    assert warm._request(kernel_of(FwdTile(64, 64), lambda config: None)) is None
    assert warm._request(kernel_of(FwdTile(96, 96), BUILD)) is not None


def test_the_number_of_workers_is_the_environments(monkeypatch):
    monkeypatch.setenv("FLEXBWD_COMPILE_WORKERS", "5")
    assert warm._workers(2) == 5
    monkeypatch.setenv("FLEXBWD_COMPILE_WORKERS", "many")
    with pytest.raises(OptionError, match="FLEXBWD_COMPILE_WORKERS"):
        warm._workers(2)


def test_no_worker_is_started_on_a_busy_machine_or_for_little(monkeypatch):
    monkeypatch.setattr(warm.os, "sched_getaffinity", lambda pid: range(16), raising=False)
    counts = []
    for load in (0.0, 12.2, 40.0):
        monkeypatch.setattr(warm.os, "getloadavg", lambda load=load: (load, load, load))
        counts.append((warm._workers(2), warm._workers(10)))
    assert counts == [(0, 8), (0, 3), (0, 0)]


def test_ahead_compiles_in_the_background(folder, monkeypatch):
    monkeypatch.setenv("FLEXBWD_COMPILE_WORKERS", "1")
    config = small(128, grad_lse=True)
    warm.ahead([(config, BUILD)])
    give_up = time.monotonic() + 120
    while cache.default().find(config) is None and time.monotonic() < give_up:
        time.sleep(0.1)
    assert kernel_of(config, BUILD).load()


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "print('top level runs')\n"
        "from flexbwd.jit import warm\n"
        "from flexbwd.sm90.tile import FwdTile\n"
        "with warm._Worker({}) as worker:\n"
        "    print(worker.ask(warm.json.dumps({'build': 'os:system', 'config': {'shared': [], 'value': 1}}))['ok'])\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.split("\n")[:2] == ["top level runs", "False"], ran.stderr


def test_a_warmup_with_fake_tensors_leaves_nothing_fake_behind():
    """In a new process, where modules are imported under the mode."""
    code = (
        "import torch, flexbwd\n"
        "from flexbwd.cli import doctor, warmup\n"
        "warmup.gather(warmup.Request(['64', 'gemma2-9b']))\n"
        "print(max(doctor.self_check_errors().values()) < 1e-10)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "True", ran.stderr
