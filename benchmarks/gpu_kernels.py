"""The persistent LSTM kernels of a GPU: errors against float64, then times beside cuDNN's.

usage: python benchmarks/gpu_kernels.py [--checks-only] [--shapes N]
Errors are relative norms, `|got - want| / |want|`, of output, states and every gradient; the limit
is 1e-2 in bf16 and 3e-3 in fp16. Then whole passes of a layer, forward and backward, T = 128 and
I = H, medians in turns: ours and cuDNN in bf16, both in a CUDA graph, and cuDNN's persistent kernel
in fp16 as `nn.LSTM` starts it. One JSON line each, benchmarks/results/<machine>/gpu_kernels.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from machine import describe_machine, results_folder
from torch import Tensor, nn

from fastlstm.ops.call import LSTMArgs, describe_call
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.lstm import run
from fastlstm.ops.reference import run_reference
from fastlstm.ops.registry import select

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 3e-3}
KINKED = 4e-2
"""Of relu and hard_sigmoid: where rounding crosses a kink, a slope is another one altogether."""
NORMED = 1.5
"""Times the limit with a layer norm, which rounds two products more."""
SHAPES = ((128, 32), (128, 128), (256, 64), (256, 128), (512, 32), (512, 128), (512, 256))
SHAPES += ((1024, 32), (1024, 64), (1024, 128))
STEPS = 128


@dataclass(frozen=True)
class Case:
    """A call to check."""

    T: int
    B: int
    I: int  # noqa: E741
    H: int
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 0
    lengths: bool = False
    mask: bool = False
    zoneout: tuple[float, float] = (0.0, 0.0)
    drawn: bool = True
    strided: bool = False
    activation: str = "tanh"
    recurrent: str = "sigmoid"
    bias: bool = True
    norm: bool = False
    backend: str = "cluster"


def cases() -> list[Case]:
    half = torch.float16
    plain = [
        Case(17, 5, 40, 128), Case(1, 1, 7, 128), Case(2, 1, 128, 512), Case(33, 8, 64, 256),
        Case(40, 13, 96, 512), Case(9, 200, 128, 512), Case(9, 500, 32, 128), Case(12, 77, 33, 100),
        Case(11, 24, 64, 300), Case(5, 3, 8, 1), Case(30, 40, 50, 200, bias=False),
    ]  # fmt: skip
    options = [
        Case(20, 19, 48, 256, tokens=90), Case(20, 19, 48, 128, tokens=2000),
        Case(20, 19, 48, 256, lengths=True), Case(20, 19, 48, 512, tokens=50, lengths=True),
        Case(20, 19, 48, 256, mask=True), Case(20, 19, 48, 256, zoneout=(0.3, 0.2)),
        Case(20, 19, 48, 200, zoneout=(0.3, 0.2), lengths=True, mask=True),
        Case(20, 19, 48, 256, zoneout=(0.3, 0.2), drawn=False),
        Case(20, 19, 48, 256, activation="relu", recurrent="hard_sigmoid"),
        Case(20, 19, 48, 130, activation="softsign", recurrent="sigmoid"),
        Case(20, 19, 48, 256, tokens=90, strided=True),
        Case(9, 20, 16, 100, norm=True, activation="sigmoid"),
        Case(1, 1, 48, 128, norm=True), Case(20, 19, 48, 256, norm=True),
        Case(12, 130, 48, 512, norm=True), Case(12, 40, 48, 512, norm=True, tokens=60),
        Case(14, 21, 30, 100, norm=True, lengths=True),
        Case(14, 21, 30, 200, norm=True, zoneout=(0.3, 0.2), mask=True),
    ]  # fmt: skip
    both = [*plain, *options, *(Case(**{**vars(c), "dtype": half}) for c in (*plain, *options))]
    large = [
        Case(17, 5, 40, 1024), Case(1, 1, 7, 640), Case(33, 8, 64, 768), Case(40, 21, 96, 900),
        Case(9, 200, 128, 1024), Case(12, 77, 33, 1024, half), Case(20, 19, 48, 1024, tokens=90),
        Case(20, 19, 48, 640, lengths=True, mask=True, zoneout=(0.3, 0.2)),
        Case(12, 40, 48, 1024, norm=True), Case(14, 21, 30, 700, norm=True, lengths=True),
        Case(12, 40, 48, 384, half, norm=True, tokens=60), Case(9, 70, 32, 384),
        Case(5, 1200, 32, 128), Case(5, 1200, 32, 128, norm=True),
    ]  # fmt: skip
    return [*both, *(Case(**{**vars(c), "backend": "grid"}) for c in (*plain, *options, *large))]


def arguments(case: Case) -> tuple[LSTMArgs, CellOptions]:
    """Returns float32 tensors of values that bf16 or fp16 holds exactly, and the options."""
    g = torch.Generator("cuda").manual_seed(case.T * 1000 + case.B)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=g) * scale).to(case.dtype).float()

    T, B, I, H = case.T, case.B, case.I, case.H  # noqa: E741
    rows = draw(case.tokens, I) if case.tokens else draw(T, B, I)
    tokens = None
    if case.tokens:
        tokens = torch.randint(case.tokens, (T, B), device="cuda", generator=g)
    if case.strided and tokens is not None:
        tokens = tokens.t().contiguous().t()
    biases = (draw(4 * H, scale=0.2), draw(4 * H, scale=0.2)) if case.bias else (None, None)
    begins = ends = mask = seed = None
    if case.lengths:
        begins = torch.randint(0, T // 2, (B,), device="cuda", generator=g)
        ends = torch.minimum(begins + torch.randint(0, T, (B,), device="cuda", generator=g),
                             torch.tensor(T, device="cuda"))  # fmt: skip
    if case.mask:
        mask = (torch.rand(B, H, device="cuda", generator=g) < 0.75).float() / 0.75
    if max(case.zoneout) > 0 and case.drawn:
        seed = torch.tensor([0x1234567890ABCDE], device="cuda")
    norm: dict[str, Tensor] = {}
    if case.norm:
        norm = {name: 1 + draw(n, scale=0.2) for name, n in zip(
            ("gamma_ih", "gamma_hh", "gamma_c", "beta_c"), (4 * H, 4 * H, H, H), strict=True
        )}  # fmt: skip
    args = LSTMArgs(
        rows, tokens, draw(B, H, scale=0.5), draw(B, H), draw(4 * H, I, scale=I**-0.5),
        draw(4 * H, H, scale=H**-0.5), *biases, mask, begins, ends, seed=seed, **norm,
    )  # fmt: skip
    options = CellOptions(
        layer_norm=case.norm,
        recurrent_dropout=0.25 if case.mask else 0.0, zoneout=case.zoneout,
        activation=case.activation, recurrent_activation=case.recurrent,
    )  # type: ignore[arg-type]  # fmt: skip
    return args, options


def errors(case: Case) -> dict[str, float]:
    """Returns the relative error of every output and gradient."""
    args, options = arguments(case)
    g = torch.Generator("cuda").manual_seed(1)
    out: Any = None
    found: list[list[Tensor]] = []
    for wide in (True, False):
        own = LSTMArgs(*(
            t.to(torch.float64 if wide else t.dtype).detach().requires_grad_(name != "mask")
            if t is not None and t.is_floating_point() else t
            for name, t in args._asdict().items()
        ))  # fmt: skip
        if wide:
            out = run_reference(own, options, torch.float64)
            weights = [torch.randn(o.shape, device="cuda", generator=g).to(case.dtype) for o in out]
        else:
            with torch.autocast("cuda", dtype=case.dtype):
                if case.backend == "cluster":
                    call = describe_call(own, options)
                    assert select(call).backend.name == "cluster", select(call)
                out = run(own, options, backend=case.backend)
        loss = sum((o.double() * w.double()).sum() for o, w in zip(out, weights, strict=True))
        asked = [t for t in own if t is not None and t.requires_grad]
        found.append([*out, *torch.autograd.grad(loss, asked)])
    names = [
        "y",
        "hT",
        "cT",
        *(n for n, t in own._asdict().items() if t is not None and t.requires_grad),
    ]
    return {name: relative(a, b) for name, a, b in zip(names, found[1], found[0], strict=True)}


def relative(got: Tensor, want: Tensor) -> float:
    size = float(want.detach().double().norm())
    return float((got.detach().double() - want.detach().double()).norm()) / max(size, 1e-30)


def nan_stays_in_its_row() -> bool:
    args, options = arguments(Case(12, 20, 16, 256))
    x = args.rows.clone()
    x[3, 7] = float("nan")
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        y = run(args._replace(rows=x), options).y
        clean = run(args, options).y
    others = [b for b in range(20) if b != 7]
    return bool(y[3:, 7].isnan().all()) and torch.equal(y[:, others], clean[:, others])


def same_bits(num: int, backend: str) -> bool:
    """Whether `num` random calls have the same bits twice, beside other work on the GPU."""
    g = torch.Generator().manual_seed(0)
    other = torch.randn(2048, 2048, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(num):
        H = {"cluster": (128, 256, 512), "grid": (128, 512, 1024)}[backend][
            int(torch.randint(3, (1,), generator=g))
        ]
        T, B = (
            int(torch.randint(1, 40, (1,), generator=g)),
            int(torch.randint(1, 140, (1,), generator=g)),
        )
        args, options = arguments(Case(T, B, 32, H))
        args = LSTMArgs(
            *(t.requires_grad_() if t is not None and t.is_floating_point() else t for t in args)
        )
        found = []
        for _ in range(2):
            with torch.cuda.stream(stream):
                other = (other @ other).clamp(-1, 1)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = run(args, options, backend=backend)
            asked = [t for t in args if t is not None and t.requires_grad]
            found.append(
                [*out, *torch.autograd.grad(out.y.float().square().sum() + out.cT.sum(), asked)]
            )
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            return False
    return True


# times --------------------------------------------------------------------------------------------


def graphed(work: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(work: object = work) -> None:  # keeps the tensors that the graph reads
        graph.replay()

    return replay


def median_us(works: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Returns the median microseconds of each, measured in turns."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            num = 5
            begin.record()
            for _ in range(num):
                work()
            end.record()
            torch.cuda.synchronize()
            if turn:
                found[name].append(begin.elapsed_time(end) / num * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def layer_works(H: int, B: int, only: str = "") -> dict[str, Callable[[], object]]:
    """Returns forward and backward passes of a layer, by who runs it."""
    kinds = {"ours bf16": torch.bfloat16, "cuDNN bf16": torch.bfloat16}
    kinds["ours through global memory"] = torch.bfloat16
    kinds["cuDNN fp16 eager"] = torch.float16
    return {name: layer_work(H, B, dtype, name) for name, dtype in kinds.items() if only in name}


def layer_work(H: int, B: int, dtype: torch.dtype, name: str) -> Callable[[], object]:
    layer = nn.LSTM(H, H, device="cuda", dtype=dtype)
    x = torch.randn(STEPS, B, H, device="cuda", dtype=dtype, requires_grad=True)
    h, c = (torch.zeros(1, B, H, device="cuda", dtype=dtype) for _ in range(2))
    dy = torch.randn(STEPS, B, H, device="cuda", dtype=dtype)
    weights = list(layer.parameters())

    def of_torch() -> object:
        return torch.autograd.grad(layer(x, (h, c))[0], [x, *weights], dy)

    def of_ours() -> object:
        backend = "grid" if name.endswith("memory") else None
        out = run(LSTMArgs(x, None, h[0].float(), c[0].float(), *weights), backend=backend)
        return torch.autograd.grad(out.y, [x, *weights], dy)

    work = of_ours if name.startswith("ours") else of_torch
    return work if "eager" in name else graphed(work)


def option_times(H: int = 512, B: int = 128, T: int = 100) -> dict[str, float]:
    """Returns the microseconds of forward and backward passes of each option of the cell."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "layer norm": {"norm": True}, "zoneout": {"zoneout": (0.1, 0.1)},
        "recurrent dropout": {"mask": True}, "hard_sigmoid": {"recurrent": "hard_sigmoid"},
        "lengths": {"lengths": True}, "tokens": {"tokens": 100},
    }  # fmt: skip
    works = {}
    for name, fields in kinds.items():
        args, options = arguments(Case(T, B, H, H, **fields))
        args = args._replace(rows=args.rows.to(torch.bfloat16))
        asked = [
            t.requires_grad_() for n, t in args._asdict().items()
            if t is not None and t.is_floating_point() and n not in ("mask", "h0", "c0")
        ]  # fmt: skip
        dy = torch.randn(T, B, H, device="cuda", dtype=torch.bfloat16)

        def work(args=args, options=options, asked=asked, dy=dy) -> object:  # type: ignore[no-untyped-def]
            return torch.autograd.grad(run(args, options).y, asked, dy)

        works[name] = graphed(work)
    return median_us(works)


def kernel_times(H: int, B: int) -> dict[str, float]:
    """Returns the microseconds a step of both recurrent kernels alone."""
    from torch.profiler import ProfilerActivity, profile

    found = {}
    for name, work in layer_works(H, B, only="ours").items():
        work()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                work()
            torch.cuda.synchronize()
        times = {e.key: e.self_device_time_total / e.count for e in seen.key_averages()}
        where = "" if name == "ours bf16" else " grid"
        found.update(
            {k + where: round(t / STEPS, 3) for k, t in times.items() if k.startswith("lstm_")}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--calls", type=int, default=300, help="random calls for equal bits")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use: nothing was checked")
        return
    faults = 0
    for case in cases():
        try:
            found = errors(case)
        except Exception as error:
            faults += 1
            print("FAILED", case, repr(error)[:600], flush=True)
            if "CUDA" in repr(error) or "CUDA" in str(type(error)):
                sys.exit(1)
            continue
        worst = max(found.values())
        limit = LIMITS[case.dtype] * (NORMED if case.norm else 1.0)
        is_right = worst < (KINKED if "relu" in case.activation else limit)
        faults += not is_right
        text = (
            " ".join(f"{name} {e:.1e}" for name, e in found.items())
            if not is_right
            else f"worst {worst:.1e}"
        )
        print(
            "right" if is_right else "WRONG",
            {
                k: v
                for k, v in vars(case).items()
                if v != getattr(Case(1, 1, 1, 1), k) or k in "TBIH"
            },
            text,
            flush=True,
        )
    print("NaN stays in its row:", nan_stays_in_its_row())
    for backend in ("cluster", "grid"):
        is_same = same_bits(options.calls, backend)
        print(f"same bits in {options.calls} random calls, {backend}:", is_same, flush=True)
    if not options.checks_only:
        for H, B in SHAPES[: options.shapes]:
            times = median_us(layer_works(H, B))
            row = {"H": H, "B": B, "T": STEPS, "us": {k: round(v, 1) for k, v in times.items()}}
            row["kernels_us_per_step"] = kernel_times(H, B)
            row["over"] = {k: round(t / times["ours bf16"], 2) for k, t in times.items()}
            print(json.dumps(row), flush=True)
            with (results_folder() / "gpu_kernels.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "machine": describe_machine()}) + "\n")
        times = option_times()
        row = {"H": 512, "B": 128, "T": 100, "options_us": {k: round(t) for k, t in times.items()}}
        row["over_plain"] = {k: round(t / times["plain"], 2) for k, t in times.items()}
        print(json.dumps(row), flush=True)
        with (results_folder() / "gpu_kernels.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "machine": describe_machine()}) + "\n")
    if faults:
        sys.exit(f"{faults} checks failed")


if __name__ == "__main__":
    main()
