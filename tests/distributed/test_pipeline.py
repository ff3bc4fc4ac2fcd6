"""Texts trained by processes that share the layers: the weights of one, to the last bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed_run import run_script
from fastlstm.distributed.channel import Channel
from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError, DistributedError, FastLSTMError
from fastlstm.runs.tensors import decode_tensors
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.lanes import Batch
from fastlstm.text.data.loader import TextLoader
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.model import LanguageModel
from fastlstm.text.pipelined_task import check_pipeline, pipeline_notes, stage_names, text_task
from fastlstm.text.plan import open_batches
from fastlstm.text.train import train

CHARACTERS = "\nabcdefghijklmnopqrstuvwxyz"
SIZES = dict(rnn_size=12, embed_size=8, seq_length=10, batch_size=6)
OPTIONS = dict(
    rnn_size=24, embed_size=12, num_layers=3, seq_length=16, batch_size=8, steps=10, pipeline=3,
    dropout=0.2, weight_drop=0.1, recurrent_dropout=0.1, lane_reset=0.1, ema=0.9, precision="bf16",
    threads=1, device="cpu", seed=3, eval_every=5, log_every=1, sample_every=0, tensorboard=False,
)  # fmt: skip
PART = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent.parent), str(Path(__file__).parent)]}
from test_pipeline import trained
place, text = sys.argv[1:3]
trained(text, f"{{place}}/moved-in")  # one process began it
trained(text, f"{{place}}/moved-out", stop_at=4)
"""


def trained(text: Path | str, out: Path | str, stop_at: int | None = None) -> None:
    """Trains, or continues, to the end or until so many steps are taken."""
    step = 0

    def see(event: dict[str, object]) -> None:
        nonlocal step
        step = event["step"] if event["event"] == "step" else step

    def stop() -> bool:
        return stop_at is not None and step >= stop_at

    try:
        train(text, out=out, resume=True, observers=[see], stop=stop, **OPTIONS)
    except FastLSTMError:
        if stop_at is None:
            raise


@pytest.mark.slow
def test_weights_are_the_same_in_one_and_in_two_processes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"word{(i * i * 7919) % 977} " for i in range(2999)))
    trained(text, alone := tmp_path / "alone")
    trained(text, tmp_path / "moved-in", stop_at=4)
    assert steps_of(tmp_path / "moved-in") == 4
    run_script(PART, 2, tmp_path, text)
    assert steps_of(tmp_path / "moved-out") == 4
    trained(text, tmp_path / "moved-out")
    for name in ("moved-in", "moved-out"):
        assert last_state(tmp_path / name) == last_state(alone), name
    assert "average.safetensors:output.bias" in last_state(tmp_path / "moved-in")
    steps = events_of(tmp_path / "moved-in", "step")
    (end,) = events_of(tmp_path / "moved-in", "end")
    assert end["pipeline"]["step_bytes"] == 2 * 16 * 8 * 24 * 2  # of bf16
    assert len(steps[-1]["rank_idle"]) == 2
    start = events_of(tmp_path / "moved-in", "start")[-1]  # the line of the end has its ceiling
    share = min(steps[-1]["gflops"] / start["ceiling_gflops"], 1.0)
    assert steps[-1]["ceiling_share"] == pytest.approx(share)
    expected = [event["loss"] for event in events_of(alone, "step")]
    assert [event["loss"] for event in steps] == expected


def events_of(out: Path, name: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == name]


def steps_of(out: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))


def last_state(out: Path) -> dict[str, bytes]:
    """Returns the tensors of the newest checkpoint, but for random numbers that are not used."""
    newest = out / f"checkpoint-{steps_of(out)}"
    return {
        f"{path.name}:{name}": tensor.numpy().tobytes()
        for path in sorted(newest.glob("*.safetensors"))
        if path.name != "state.safetensors"
        for name, tensor in decode_tensors(path.read_bytes(), path).items()
    }


def task_of(pipeline: int, **options):
    sizes = {**SIZES, "num_layers": 3, "precision": "fp32", **options}
    config = TrainConfig(**sizes, pipeline=pipeline)
    ids = torch.arange(2000) ** 2 % 27
    torch.manual_seed(0)
    model = LanguageModel(config.model_config(27, options.get("dropout", 0.0))).train()
    return text_task(
        World(), config=config, model=model, loader=TextLoader(open_batches(config, ids.numpy())),
        valid_ids=ids.numpy(), tokenizer=CharTokenizer(CHARACTERS), device=torch.device("cpu"),
        model_files={}, publish_weights=None, report_s=0.0, final_test=None,
    )  # fmt: skip


def passes(task, batch: Batch) -> float:
    if task.pipeline is not None:
        return task.pipeline.passes(batch, 0)
    total = 0.0
    for loss in task.losses(batch, [slice(0, task.num_rows(batch))]):
        loss.backward()
        total += float(loss.detach())
    return total


def test_a_signal_to_a_stage_is_told_with_the_step():
    task = task_of(2)
    passes(task, task.loader.next())
    assert task.pipeline._world.stopped_by is None
    task.pipeline._world.signal = int(signal.SIGINT)
    passes(task, task.loader.next())
    assert task.pipeline._world.stopped_by == "SIGINT to rank 0 (this process)"


@pytest.mark.parametrize("num_chunks", [1, 3, 10])
@pytest.mark.parametrize("residual", [False, True])
def test_chunks_have_the_gradient_of_the_whole(num_chunks, residual):
    whole, cut = task_of(0, residual=residual), task_of(num_chunks, residual=residual)
    for _ in range(2):  # the second has a state
        batch = whole.loader.next()
        assert passes(cut, batch) == pytest.approx(passes(whole, batch), rel=1e-6)
    gradients = [p.grad for p in whole.model.parameters()]
    for parameter, expected in zip(cut.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)
    for name, state in whole.carried().items():
        torch.testing.assert_close(cut.carried()[name], state, rtol=1e-5, atol=1e-6)
    cut.model.zero_grad()
    whole.model.zero_grad()
    passes(whole, batch), passes(cut, batch)
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.model.parameters()])
    torch.testing.assert_close(cut.pipeline.norm, norm)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"residual": True}, {"output_norm": True}])
@pytest.mark.parametrize("embed_size", [8, 12])
def test_what_passes_has_the_dtype_that_is_expected(precision, options, embed_size):
    task = task_of(2, **options, embed_size=embed_size, precision=precision)
    task._is_last = False
    (shape, *_) = task.begin(task.loader.next(), 0)
    passed = task.forward(0, None)
    assert passed.dtype == task.boundary_dtype
    assert tuple(passed.shape) == shape


def test_a_sequence_has_one_dropout_mask_in_all_its_chunks():
    whole, cut = task_of(1, dropout=0.5), task_of(5, dropout=0.5)
    batch = whole.loader.next()
    loss = passes(whole, batch)
    assert passes(cut, batch) == pytest.approx(loss, rel=1e-6)
    assert cut.pipeline.passes(batch, 1) != pytest.approx(loss, rel=1e-4)  # another step


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shards": 2}, "shards: the layers are divided, not the batch; leave out one of them"),
        ({"accumulate": 2}, "pipeline cannot be combined with accumulate: a step is"),
        ({"sync_every": 2}, "sync_every: each process holds only part of the weights"),
        ({"wire": "bf16"}, "cannot be combined with wire='bf16': activations are sent as"),
        ({"tie_weights": True}, "with tie_weights: two processes would hold the same weight"),
        ({"zoneout": 0.1}, "with zoneout: it uses a new mask for every token"),
        ({"dropout_kind": "plain"}, "cannot be combined with dropout_kind='plain': it uses"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(options, told):
    with pytest.raises(ConfigError) as raised:
        TrainConfig(pipeline=4, **options)
    assert told in str(raised.value)
    TrainConfig(**options)


@pytest.mark.parametrize(
    ("options", "device", "told"),
    [
        (
            {"num_layers": 2},
            "cpu",
            "4: 3 processes need at least 3 layers, the model has 2; give num_layers=3",
        ),
        (
            {"seq_length": 3},
            "cpu",
            "a sequence of 3 tokens cannot be split into 4 chunks; give pipeline=3 or less",
        ),
        ({}, "cuda", "pipeline=4: runs on CPUs, not on cuda; give device='cpu'"),
    ],
)
def test_a_run_without_a_pipeline_is_refused(options, device, told):
    config = TrainConfig(**{**SIZES, "num_layers": 3, **options, "pipeline": 4})
    with pytest.raises(ConfigError) as raised:
        check_pipeline(config, config.num_layers, torch.device(device), 3)
    assert told in str(raised.value)


def test_a_run_says_what_its_pipeline_will_cost():
    sizes = {**SIZES, "batch_size": 600}
    config = TrainConfig(**sizes, num_layers=3, pipeline=5, precision="fp32")
    (note,) = pipeline_notes(config, config.model_config(27, 0.0), World(0, 3))
    assert note.startswith("pipeline: 5 chunks of about 2 tokens: if stages are equal,")
    told = "processes wait 28.6% of the passes and send 0.6 MB a step over each boundary (1.2 MB in"
    assert told in note
    sizes = config.model_config(27, 0.0)
    assert stage_names(config, sizes, World(0, 3)) == {"stages": ["1", "2", "3"]}
    assert stage_names(config, sizes, World(0, 2)) == {"stages": ["1-2", "3"]}
    assert stage_names(config, sizes, World()) == {}
    assert pipeline_notes(TrainConfig(), config.model_config(27, 0.0), World(0, 3)) == ()


def test_the_stage_that_is_waited_for_is_named(monkeypatch):
    def wait() -> None:
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")

    world = World(1, 3)
    world.names = [f"host{rank}" for rank in range(3)]
    monkeypatch.setattr("torch.distributed.irecv", lambda *a, **k: SimpleNamespace(wait=wait))
    channel = Channel(world, -1)
    channel.expect([(2, 3)], torch.float32)
    with pytest.raises(
        DistributedError, match=r"^rank 2 \(host2\) has not answered for 60 s, reported by"
    ):
        channel.received(0)
