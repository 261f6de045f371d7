"""The command line: names, options and help. Each command imports its work when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Attention with programmable scores and masks: look at mods and masks, check gradients, measure speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MOD = "a name of the zoo (`flexbwd show` alone lists them), or file.py:name, or package.module:name"
Lengths = Annotated[str, typer.Option("-S", "--lengths", help="sequence length, or query,key: 1024 or 512,1024")]
Block = Annotated[str, typer.Option(help="mask block size, or query,key sizes")]


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Versions, GPU, driver, cache, and a self-check against the reference; exit code 1 when something is broken."""
    from flexbwd.cli.doctor import run

    raise typer.Exit(run(as_json=json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def show(
    context: typer.Context,
    mod: Annotated[str, typer.Argument(help=f"mask or score mod: {MOD}")] = "",
    score: Annotated[str, typer.Option(help="score mod to show together with the mask")] = "",
    lengths: Lengths = "1024",
    block: Block = "128",
    heads: Annotated[int, typer.Option(help="number of heads the mods are made for")] = 1,
    head: Annotated[int, typer.Option(help="the head that is shown")] = 0,
    at_score: Annotated[float, typer.Option(help="score at which the score mod is shown")] = 0.0,
    width: Annotated[int, typer.Option(help="columns of the text picture", min=8)] = 64,
    out: Annotated[Path | None, typer.Option(help="write a picture here (.png, .svg, .pdf) instead of text")] = None,
) -> None:
    """Picture of a mask and a score mod: tile classes and single elements.

    Further options go to the mod's factory: `flexbwd show sliding_window --window 256`.
    """
    from flexbwd.cli.show import Request, list_zoo, run

    if not mod and not score:
        list_zoo()
        return
    run(Request(mod, score, lengths, block, heads, head, at_score, width, out), context.args)


@app.command()
def check(
    mod: Annotated[str, typer.Argument(help=f"score mod or mask mod: {MOD}")],
    bwd: Annotated[str, typer.Option(help="hand-written score_mod_bwd; default: NAME_bwd beside file.py:NAME")] = "",
    lengths: Lengths = "17,23",
    heads: Annotated[int, typer.Option(help="number of heads")] = 4,
    batch: Annotated[int, typer.Option(help="batch size")] = 2,
    seed: Annotated[int, typer.Option(help="seed of the random scores")] = 0,
) -> None:
    """Check a mod: derived against hand-written backward, fp64 gradients, what the kernels will do with it.

    Exit code 1 when something differs.
    """
    from flexbwd.cli.check import run

    raise typer.Exit(run(mod, bwd, lengths=lengths, heads=heads, batch=batch, seed=seed))


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where torch sees one")] = "auto",
    workload: Annotated[list[str] | None, typer.Option(help="cuda: only these, globs; repeatable")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="cuda: only these implementations, globs; repeatable")] = None,
    which: Annotated[list[str] | None, typer.Option("--pass", help="cuda: fwd or bwd; default both")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for <device>-<date>.json and .md")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="small sizes: a smoke test, not a measurement")] = False,
    peers: Annotated[bool, typer.Option(help="cpu: also measure torch's compiled flex_attention forward")] = True,
    probe: Annotated[bool, typer.Option(help="cuda: first calls, in processes of their own, before measuring")] = True,
    caches: Annotated[
        Path | None, typer.Option(help="cuda: keep compiled code here; default: cold, thrown away")
    ] = None,
    repeats: Annotated[int, typer.Option(help="cpu: runs of each case, the best counts; cuda: rounds", min=0)] = 7,
) -> None:
    """Speed on this machine: on a GPU against the installed peers, on a CPU against dense attention, as ratios.

    Exit code 2 for an option that is wrong; an implementation that fails is a line of the report.
    """
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        from flexbwd.cli.bench_gpu.run import Request
        from flexbwd.cli.bench_gpu.run import run as run_gpu

        run_gpu(Request(workload or (), impl or (), which or (), repeats, quick, probe, out, caches))
        return
    for name, given in (("--workload", workload), ("--impl", impl), ("--pass", which), ("--caches", caches)):
        if given:
            raise typer.BadParameter(f"{given} is for a GPU, and this runs on {device}; leave it out", param_hint=name)
    from flexbwd.cli.bench import run

    run(device, out=out, quick=quick, peers=peers, repeats=max(1, repeats))


@app.command()
def warmup(
    shapes: Annotated[list[str] | None, typer.Argument(help="head dims (128, 192/128) or models (llama3-8b)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16 or fp16; repeatable")] = None,
    mask: Annotated[list[str] | None, typer.Option(help="dense, causal or window; repeatable")] = None,
    heads: Annotated[str, typer.Option(help="query/key heads: 32/8; grouped heads are other kernels")] = "",
    length: Annotated[int, typer.Option("-S", "--length", help="sequence length", min=1)] = 4096,
    backward: Annotated[bool, typer.Option(help="the kernels of the backward too")] = True,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=0, help="worker processes; default: by cores")] = None,
) -> None:
    """Compile GPU kernels into the kernel cache, so that later processes load them; needs no GPU itself.

    Without arguments: head dims 64 and 128, dense and causal.
    """
    from flexbwd.cli.warmup import Request, run

    dtypes, masks = tuple(dtype or ("bf16",)), tuple(mask or ())
    raise typer.Exit(run(Request(tuple(shapes or ()), dtypes, masks, heads, length, backward, jobs)))
