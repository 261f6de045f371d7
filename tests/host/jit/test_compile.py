"""Kernel handles, the alarm, and errors."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from flexbwd import jit
from flexbwd.errors import (
    CompileAfterWarmupError,
    CompileError,
    CompileNotice,
    ConfigError,
    OptionError,
    UnsupportedError,
)
from flexbwd.jit import alarm, compile
from flexbwd.jit.compile import _words, compile_now, compiled, events, forget, kernel_of, name_of
from flexbwd.sm90.tile import FwdTile
from tests.host.jit.conftest import BUILD, small

CONFIG = FwdTile(64, 64)


@pytest.fixture
def exported(made, monkeypatch):
    """Compiling gives the stand-in."""
    monkeypatch.setattr(compile, "compile_now", lambda build, name: made)
    return made


# -- handles -----------------------------------------------------------------------------------------------------------
def test_equal_configurations_share_one_handle():
    assert kernel_of(FwdTile(64, 64), BUILD) is kernel_of(FwdTile(64, 64), BUILD)
    assert kernel_of(FwdTile(64, 64), BUILD) is not kernel_of(FwdTile(96, 96), BUILD)


def test_after_the_first_call_run_is_the_compiled_function(exported):
    kernel = kernel_of(CONFIG, BUILD)
    assert not kernel.is_ready
    function = kernel.ready()
    assert kernel.is_ready and kernel.run is function and type(function).__module__.startswith("tvm_ffi")


def test_forgotten_kernels_come_from_disk_and_are_not_compiled(exported):
    kernel = kernel_of(CONFIG, BUILD)
    kernel.ready()
    forget()
    assert not kernel.is_ready
    with pytest.raises(TypeError):
        kernel.run(1, 2, 3)  # the library's own check of its arguments
    assert [e.how for e in list(events)[-2:]] == ["compiled", "loaded"] and exported.exports == 1


def test_a_function_builds_as_well_as_a_name(exported, monkeypatch):
    calls = []
    monkeypatch.setattr(compile, "compile_now", lambda build, name: build())
    kernel_of(CONFIG, lambda config: calls.append(config) or exported).ready()
    assert calls == [CONFIG]
    assert compiled(FwdTile(96, 96), lambda: exported) is kernel_of(FwdTile(96, 96), BUILD).run


def test_a_real_kernel_compiles_and_loads():
    kernel = kernel_of(small(grad_lse=True), BUILD)
    for _ in range(2):
        with pytest.raises(TypeError):
            kernel.run(1, 2, 3)
        forget()


def test_a_configuration_is_named_in_a_few_words():
    from flexbwd.sm90.walks import WalkKind

    config = small()
    assert name_of(config) == "Delta bfloat16 value_dim 16 tile_m 64 dq_floats 0 no has_grad_lse"
    assert name_of(FwdTile(64, 96, stages=5)) == "FwdTile dim 64 value_dim 96 stages 5"
    assert _words(WalkKind(has_lo=True)) == ["has_lo"]
    assert name_of("text") == "text"


# -- alarm -------------------------------------------------------------------------------------------------------------
def test_inside_after_warmup_a_compile_is_an_error_and_a_load_is_not(exported):
    kernel_of(CONFIG, BUILD).ready()
    forget()
    with jit.after_warmup():
        kernel_of(CONFIG, BUILD).ready()
        with pytest.raises(CompileAfterWarmupError, match="is compiled after warm-up"):
            kernel_of(FwdTile(96, 96), BUILD).ready()
        with jit.after_warmup("off"):
            kernel_of(FwdTile(96, 96), BUILD).ready()
    kernel_of(FwdTile(128, 128), BUILD).ready()


def test_blocks_nest():
    with jit.after_warmup("error"), jit.after_warmup("off"):
        with jit.after_warmup("error"), pytest.raises(CompileAfterWarmupError):
            alarm.check("a kernel")
        alarm.check("a kernel")


def test_the_alarm_reaches_other_threads(exported):
    """autograd runs the backward in threads of its own."""
    seen = []

    def work():
        try:
            kernel_of(CONFIG, BUILD).ready()
        except CompileAfterWarmupError as error:
            seen.append(error)

    with jit.after_warmup():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(seen) == 1


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_the_environment_arms_it_once_warm(exported, monkeypatch, mode):
    from flexbwd.jit.warm import warm

    monkeypatch.setenv("FLEXBWD_COMPILE_ALARM", mode)
    kernel_of(CONFIG, BUILD).ready()
    warm([(FwdTile(96, 96), BUILD)])
    if mode == "warn":
        with pytest.warns(CompileNotice, match="FwdTile"):
            kernel_of(FwdTile(128, 128), BUILD).ready()
    else:
        with pytest.raises(CompileAfterWarmupError):
            kernel_of(FwdTile(128, 128), BUILD).ready()
    warm([(FwdTile(160, 160), BUILD)])  # asked for: no alarm


def test_a_mode_that_does_not_exist_is_refused(monkeypatch):
    with pytest.raises(OptionError, match="off, warn, error"), jit.after_warmup("loud"):
        pass
    monkeypatch.setattr(alarm, "_warmed", True)
    monkeypatch.setenv("FLEXBWD_COMPILE_ALARM", "loud")
    with pytest.raises(OptionError, match="FLEXBWD_COMPILE_ALARM"):
        alarm.check("a kernel")


# -- errors ------------------------------------------------------------------------------------------------------------
def test_without_the_dsl_the_error_says_what_to_install(monkeypatch):
    for name in ("cutlass", "cutlass.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"pip install 'nvidia-cutlass-dsl"):
        kernel_of(CONFIG, BUILD).ready()


def one_tensor():
    from flexbwd.jit.launch import fake_compact

    return (fake_compact(torch.float32, 1),)


def test_what_the_dsl_refuses_becomes_our_error_with_the_configuration():
    from tests.host.jit.faulty import leaves_early

    with pytest.raises(
        CompileError, match=r"^kernel of FwdTile\(.* cannot be compiled: .*EARLY_EXIT.*report"
    ) as caught:
        compile_now(lambda: (leaves_early, one_tensor()), name=f"kernel of {CONFIG}")
    assert caught.value.__cause__ is not None and "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_our_own_errors_come_out_of_traced_code_as_they_are():
    from tests.host.jit.faulty import refuses

    with pytest.raises(ConfigError, match=r"^tile_n=3"):
        compile_now(lambda: (refuses, one_tensor()))


def test_kernels_are_for_hopper_whatever_the_dsl_was_imported_for(tmp_path):
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    before, settings.arch = settings.arch, "sm_100a"
    try:
        from flexbwd.sm90.delta import build_delta

        kernel = compile_now(lambda: build_delta(small()), f"--enable-tvm-ffi --keep-ptx --dump-dir {tmp_path}")
        assert ".target sm_90a" in kernel.artifacts.PTX and settings.arch == "sm_100a"
    finally:
        settings.arch = before
