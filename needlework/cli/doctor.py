"""The command that checks the kernels on this machine: doctor."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from .app import app, console
from .tables import build_table, verdict_table


@app.command()
def doctor(
    full: Annotated[bool, typer.Option("--full", help="Every size, form and dtype of every config.")] = False,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile every kernel; needs no GPU.")] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Compile what may be picked on this GPU: sm_80, sm_89, sm_90, sm_100 or gfx942; may be repeated."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write what was found here, as JSON.")] = None,
) -> None:
    """Check the Triton kernels on this machine, under every launch config that may be picked here.

    Forward and gradients against the definition in float64, by the error budget, each run twice. A config that is wrong (over twice
    its budget, not the same twice, or not to be run) goes on this machine's denylist and is never taken here again; what is over
    the budget by less is reported. The exit status is 1 for either. Attach the report to an issue.
    """
    import time

    if importlib.util.find_spec("triton") is None:  # before what imports it
        raise ValueError("doctor: Triton is not installed; pip install triton (the ops run on PyTorch alone without it)")
    from needlework.experiment.progress import Lines
    from needlework.testing import processes

    began = time.monotonic()
    processes.context()  # its server imports PyTorch beside us
    import torch

    from needlework.ops.runtime.denylist import path
    from needlework.ops.runtime.launch_configs import capability, interpreted
    from needlework.ops.runtime.target import TARGETS
    from needlework.testing import builds
    from needlework.testing import doctor as checks

    targets = target or []
    for name in targets:
        if name not in TARGETS:
            raise ValueError(f"doctor --target: got {name}, expected one of {', '.join(TARGETS)}")
    if targets and not compile_only:
        raise ValueError("doctor --target: is for --compile-only; without it doctor judges the GPU that is here")

    if compile_only and interpreted():
        raise ValueError("doctor --compile-only: unset TRITON_INTERPRET, the interpreter compiles nothing")
    if not (compile_only or interpreted() or torch.cuda.is_available()):
        raise ValueError("doctor: no CUDA device here; --compile-only compiles the kernels without one")
    known_here = checks.facts([TARGETS[name] for name in targets])
    for name, value in known_here.items():
        console.print(f"{name}: {value}", soft_wrap=True)
    device = torch.device("cpu" if interpreted() or compile_only else "cuda")
    compiled_for = [TARGETS[name].arch for name in targets] or [(9, 0)]
    for arch in compiled_for if compile_only else [capability(device)]:
        if warning := checks.warning(known_here, arch):
            console.print(warning, style="yellow", soft_wrap=True)
    with console.status("compiling") as status:
        lines = Lines(console)

        def at(now: str) -> None:
            status.update(now)
            lines(lambda: f"{time.monotonic() - began:4.0f} s, {now}")

        if compile_only:
            found = built = builds.compile_all(full, targets, lambda count, total: at(f"compiling: {count} of {total}"))
            table, failed, denied = build_table(built), sum(bool(b.error) for b in built), False
        else:
            at("compiling and judging")

            def tell(v: checks.Verdict, count: int, total: int) -> None:
                row = f"{v.op} {v.form}, {v.engine} {v.config}, {v.dtype}, K {v.K}, V {v.V}"
                if full or v.failing:  # minutes, or what is known already
                    verdict = "; ".join(v.failing) or "ok"
                    console.print(f"{time.monotonic() - began:4.0f} s, {count} of {total}: {row}: {verdict}, {v.seconds} s")
                    status.update(f"{count} of {total}: {row}")
                else:
                    at(f"{count} of {total}: {row}")

            found = judged = checks.run(device, full, tell)
            table, failed = verdict_table(judged), sum(bool(v.failing) for v in judged)
            denied = not interpreted() and any(v.wrong for v in judged)  # the interpreter's are not put on the list
    console.print(table)
    seconds = time.monotonic() - began
    if report is not None:
        report.write_text(json.dumps(checks.report(found, known_here, seconds), indent=1))
        console.print(f"report: {report}", soft_wrap=True)
    if failed:
        console.print(f"{failed} of {len(found)} failed, {seconds:.0f} s", style="red")
        if denied:
            console.print(f"what is wrong is on the denylist {path()}; --full removes what passes it", soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"{len(found)} checked, all right, {seconds:.0f} s")
