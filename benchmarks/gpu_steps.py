"""Training steps of text models on a GPU: ours by default beside plain torch, in turns.

usage: python benchmarks/gpu_steps.py [--shapes N] [--turns N] [--only WORD]
Plain torch is embedding, `nn.LSTM`, linear and fused AdamW; eager, and whole steps in a CUDA graph,
in TF32, bf16 and fp16. Ours is what `fastlstm.train` steps with: Muon, loader, clipping. Thousand
tokens a second, one JSON line for each shape in benchmarks/results/<machine>/gpu_steps.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import graphed
from machine import describe_machine, results_folder
from torch import nn

import fastlstm

SHAPES = (
    (512, 1, 32, 128), (512, 1, 128, 100), (512, 2, 128, 128), (1024, 2, 256, 128),
    (128, 2, 32, 100), (256, 1, 64, 100),
)  # fmt: skip
VOCABULARY = 100


def plain_step(
    H: int, layers: int, B: int, T: int, precision: str, *, in_graph: bool
) -> Callable[[], object]:
    """Returns a training step of plain torch, from carried state."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    embedding, output = nn.Embedding(VOCABULARY, H // 2).cuda(), nn.Linear(H, VOCABULARY).cuda()
    lstm = nn.LSTM(H // 2, H, layers).cuda()
    parameters = [*embedding.parameters(), *lstm.parameters(), *output.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=True)
    x, y = torch.randint(VOCABULARY, (2, T, B), device="cuda")
    h, c = torch.zeros(2, layers, B, H, device="cuda")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scale = 1024.0 if precision == "fp16" else 1.0

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            out, (h1, c1) = lstm(embedding(x), (h, c))
            logits = output(out)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        (loss * scale).backward()
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in parameters], 1 / scale)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        h.copy_(h1.detach())
        c.copy_(c1.detach())

    return graphed(step) if in_graph else step


def seconds_of(step: Callable[[], object], num: int = 20) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / num


def ours(
    text: Path, H: int, layers: int, B: int, T: int, precision: str, steps: int, **more: Any
) -> dict[str, Any]:
    """Returns tokens a second of the settled steps of a run, and what it says of itself."""
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        fastlstm.train(
            text, out=Path(folder) / "run", observers=[events.append], device="cuda",
            rnn_size=H, num_layers=layers, batch_size=B, seq_length=T, precision=precision,
            steps=steps, log_every=20, eval_every=10**6, checkpoint_every=10**6, sample_every=0,
            tensorboard=False, cache_dir=str(text.parent / "cache"), **more,
        )  # fmt: skip
    found = [e for e in events if e["event"] == "step"]
    start = next(e for e in events if e["event"] == "start")
    settled = found[len(found) // 3 :]
    span = settled[-1]["elapsed_s"] - settled[0]["elapsed_s"]
    rate = (settled[-1]["units"] - settled[0]["units"]) / span
    notes = [e["text"] for e in events if e["event"] == "message" and e["level"] == "warning"]
    end = next(e for e in events if e["event"] == "end")
    return {
        "rate": rate, "kernels": start.get("kernels"), "warnings": notes,
        "loss": found[-1]["loss"], "setup_s": end["spent_s"].get("setup"),
        "precision": start.get("precision"), "memory_gb": end["peak_memory_bytes"] / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precisions", default="bf16")
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use: nothing was measured")
        return
    folder = Path(tempfile.mkdtemp())
    text = options.text or folder / "book.txt"
    if options.text is None:
        from pydoc_data import topics

        text.write_text("\n".join(topics.topics.values()) * 4)
    for H, layers, B, T in SHAPES[options.first : options.first + options.shapes]:
        peers: dict[str, float] = {}
        for precision in ("tf32", "bf16", "fp16"):
            for in_graph in (True, False):
                name = f"torch {precision} {'graph' if in_graph else 'eager'}"
                try:
                    times = [
                        seconds_of(plain_step(H, layers, B, T, precision, in_graph=in_graph))
                        for _ in range(options.turns)
                    ]
                    peers[name] = B * T / statistics.median(times)
                except RuntimeError as error:
                    print(name, repr(error)[:150], flush=True)
                    torch.cuda.synchronize()
        row: dict[str, Any] = {"H": H, "layers": layers, "B": B, "T": T}
        row["torch"] = {k: round(v / 1e3) for k, v in peers.items()}
        best = max(peers.values())
        for precision in options.precisions.split(","):
            for name, more in (("muon", {}), ("adamw", {"optimizer": "adamw"})):
                found = ours(text, H, layers, B, T, precision, options.steps, **more)
                row[f"ours {precision} {name}"] = {
                    **found, "rate": round(found["rate"] / 1e3), "over": found["rate"] / best,
                }  # fmt: skip
        print(json.dumps(row), flush=True)
        with (results_folder() / "gpu_steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "machine": describe_machine()}) + "\n")


if __name__ == "__main__":
    main()
