"""Runs on a GPU: the same bits twice and after a stop."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fastlstm
from fastlstm.errors import Stopped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def trained(path, stop_at=0, **options):
    """Returns the weights of a short run, which is stopped once and continued with `stop_at`."""
    text, seen = path / "book.txt", list[int]()
    text.write_text("the cat sat on the mat, and so it did.\n" * 400)

    def watch(event):  # a callback that sees updates would prevent graphs
        if event["event"] == "step":
            seen.append(1)

    fields: dict[str, Any] = {
        "rnn_size": 32, "embed_size": 16, "num_layers": 2, "batch_size": 8, "seq_length": 16,
        "steps": 12, "dropout": 0.2, "device": "cuda", "observers": [watch], "tensorboard": False,
        "cache_dir": str(path / "cache"), "log_every": 2,
    } | options  # fmt: skip
    out = path / "run"
    if stop_at:
        with pytest.raises(Stopped):
            fastlstm.train(text, out=out, stop=lambda: len(seen) >= stop_at, **fields)
    fastlstm.train(text, out=out, resume=bool(stop_at), **fields)
    return fastlstm.LM.load(out).model.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_has_the_same_bits_again_and_after_a_stop(tmp_path, precision):
    found = []
    for name, stop_at in (("first", 0), ("again", 0), ("stopped", 5)):
        (tmp_path / name).mkdir()
        found.append(trained(tmp_path / name, stop_at, precision=precision))
    for other in found[1:]:
        for name, weight in found[0].items():
            assert torch.equal(other[name], weight), name


@pytest.mark.parametrize("kind", ["copied", "hooked", "projected"])
def test_weights_in_several_buffers_cost_a_copy_and_no_warning(kind):
    options: dict[str, Any] = {"proj_size": 4} if kind == "projected" else {}
    layer = fastlstm.LSTM(5, 8, num_layers=2, bidirectional=True, **options).cuda()
    torchs = nn.LSTM(5, 8, num_layers=2, bidirectional=True, **options).cuda()
    torchs.load_state_dict(layer.state_dict())
    if kind == "hooked":
        layer.weight_hook = lambda name, w: w * 1.0
    else:
        layer = copy.deepcopy(layer)
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone()
    x = torch.randn(6, 3, 5, device="cuda")
    got, want = layer(x)[0], torchs(x)[0]
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    for mine, other in zip(layer.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_averages_of_weights_and_a_memory_limit(tmp_path):
    assert trained(tmp_path, precision="fp32", ema=0.9, memory_limit_gb=1.0)


def test_a_budget_chooses_size_precision_and_dropout(tmp_path):
    text, events = tmp_path / "book.txt", list[Any]()
    text.write_text("the cat sat on the mat, and so it did.\n" * 20_000)
    fastlstm.train(
        text, out=tmp_path / "run", budget="20s", device="cuda", tensorboard=False, sample_every=0,
        cache_dir=str(tmp_path / "cache"), observers=[events.append],
    )  # fmt: skip
    said = [event["text"] for event in events if event["event"] == "message"]
    assert any(note.startswith("chose ") for note in said)
    (dropout,) = (note for note in said if note.startswith("dropout"))
    epochs = float(dropout.partition("about ")[2].split()[0])
    steps = [event for event in events if event["event"] == "step"]
    assert 0.5 < epochs / steps[-1]["epoch"] < 2.0
    (start,) = (event for event in events if event["event"] == "start")
    assert start["precision"] in ("tf32", "bf16", "fp16")
    assert "GPU" in start["ceiling_how"]


def test_too_little_memory_splits_or_is_one_line(tmp_path):
    with pytest.raises(fastlstm.FastLSTMError, match="memory_limit_gb=500"):
        trained(tmp_path, memory_limit_gb=500)
    big = {"rnn_size": 1024, "embed_size": 256, "num_layers": 1, "seq_length": 64, "steps": 2}
    assert trained(tmp_path, batch_size=256, memory_limit_gb=0.6, precision="auto", **big)
    (tmp_path / "small").mkdir()
    with pytest.raises(fastlstm.FastLSTMError, match="out of GPU memory: this GPU has"):
        trained(
            tmp_path / "small", memory_limit_gb=0.1, precision="bf16", **{**big, "rnn_size": 4096}
        )
