"""Weights written by every path there is, between calls that may reuse what was packed."""

import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

import fastlstm
import weight_writes
from fastlstm.ops import packed_weights
from weight_writes import campaign

I, H = 5, 7  # noqa: E741


def by_data_copy(layer):
    for p in layer.parameters():
        p.data.copy_(torch.rand_like(p) - 0.5)


def by_data_mul(layer):
    layer.weight_ih_l0.data.mul_(2)


def by_vector(layer):
    vector_to_parameters(parameters_to_vector(layer.parameters()) * 1.5, layer.parameters())


def by_numpy(layer):
    layer.weight_ih_l0.detach().numpy()[...] *= 3


def by_moving(layer):
    layer.double().data = None
    layer.float()
    layer.weight_ih_l0.data.mul_(2)


def by_swapping(layer):
    """As by_moving, where torch gives each parameter the memory of another tensor."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        by_moving(layer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def by_flat_weights(layer):
    layer._flat_weights[0] = torch.ones(4 * H, I)


def by_parameter_dict(layer):
    """As `torch.func.functional_call` puts its own there."""
    layer._parameters["weight_hh_l0"] = nn.Parameter(torch.ones(4 * H, H))


def by_parametrization(layer):
    parametrize.register_parametrization(layer, "weight_hh_l0", nn.Tanh())
    layer(torch.zeros(1, 1, I))
    layer.parametrizations.weight_hh_l0.original.data.mul_(2)


def by_weight_norm(layer):
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    layer(torch.zeros(1, 1, I))
    layer.parametrizations.weight_hh_l0.original0.data.mul_(2)


def by_pruning(layer):
    prune.random_unstructured(layer, "weight_hh_l0", amount=0.5)


WRITES = [value for name, value in sorted(globals().items()) if name.startswith("by_")]
# T, B: ready, reused, long
SHAPES = {"ready": (1, 1), "short": (3, 4), "long": (128, 32)}


def same_layer(layer):
    """torch's own, of the weights as they are now."""
    twin = nn.LSTM(layer.input_size, layer.hidden_size, bias=layer.bias)
    layer._update_flat_weights()  # as torch's own does first of all
    names = [name for name, _ in twin.named_parameters()]
    twin.load_state_dict(dict(zip(names, layer._flat_weights, strict=True)))
    return twin


def assert_now(layer, x, with_gradients=False, is_bf16=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        with torch.set_grad_enabled(with_gradients):
            got = layer(x)[0].detach()
        with torch.no_grad():
            want = same_layer(layer)(x)[0]
    limit = 0.05 if is_bf16 else 1e-5
    torch.testing.assert_close(got, want, rtol=limit, atol=limit)


@pytest.mark.usefixtures("peer_in_bf16")
@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("with_gradients", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_a_write_is_seen_by_the_next_call(write, shape, with_gradients, is_bf16):
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(I, H), torch.randn(*SHAPES[shape], I)
    for _ in range(3):
        assert_now(layer, x, with_gradients, is_bf16)
    for _ in range(2):
        write(layer)
        assert_now(layer, x, with_gradients, is_bf16)
        if write in (by_parametrization, by_weight_norm):
            break


@pytest.mark.isa
@pytest.mark.usefixtures("peer_in_bf16")
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_of_one_dtype_read_no_weights_packed_for_the_other(shape):
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(I, H), torch.randn(*SHAPES[shape], I)
    for is_bf16 in (False, True, False, True):
        assert_now(layer, x, is_bf16=is_bf16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("write", [by_data_copy, by_data_mul, by_numpy, by_vector, repr])
def test_gradients_belong_to_the_current_weights(write, bias):
    """Written to or, by `repr`, not."""
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(I, H, bias=bias), torch.randn(3, 4, I)
    for _ in range(3):
        twin = same_layer(layer)
        for each in (layer, twin):
            each.zero_grad()
            each(x)[0].square().sum().backward()
        for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
        write(layer)


@pytest.mark.parametrize("write", [by_data_copy, by_data_mul, by_numpy])
@pytest.mark.parametrize("size", [200, 512])
def test_a_write_to_large_weights_is_seen_by_the_next_call(write, size):
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(size, size), torch.randn(1, 1, size)
    for _ in range(3):
        for _ in range(3):
            assert_now(layer, x)
        write(layer)
        assert_now(layer, x)


@pytest.mark.parametrize("size", [300, 1024])
def test_one_value_of_large_weights_is_seen_by_the_next_call(size):
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(8, size), torch.ones(1, 1, 8)
    hx = torch.ones(1, 1, size), torch.ones(1, 1, size)
    with torch.no_grad():
        seen = {float(layer(x, hx)[0].double().sum()) for _ in range(3)}
        for place in torch.randint(0, 4 * size * size, (30,)).tolist():
            layer.weight_hh_l0.data.view(-1)[place] += 0.5
            torch.testing.assert_close(layer(x, hx)[0], same_layer(layer)(x, hx)[0])
            seen.add(float(layer(x, hx)[0].double().sum()))
    assert len(seen) == 31


@pytest.mark.parametrize("seed", range(4))
def test_random_writes_are_seen(seed):
    campaign(100, seed)


def test_every_route_is_seen():
    """Whatever the random writes draw."""
    torch.manual_seed(0)
    for write in weight_writes.WRITES:
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_hh_l0"):
            layer, x = fastlstm.LSTM(I, 40), torch.randn(1, 1, I)
            hx = torch.randn(1, 1, 40), torch.randn(1, 1, 40)
            with torch.no_grad():
                for _ in range(3):
                    before = layer(x, hx)[0]
                write(layer, name, slice(13, 14), 0.7)
                want = weight_writes.same_layer(layer)(x, hx)[0]
                assert not torch.equal(want, before), write
                torch.testing.assert_close(layer(x, hx)[0], want, msg=str(write))


@pytest.mark.parametrize("relay", ["t_", "data", "set_"])
def test_another_layout_of_the_same_bytes_is_seen(relay):
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(32, 8), torch.randn(1, 1, 32)  # weight_ih_l0 is square
    for _ in range(3):
        assert_now(layer, x)
    weight = layer.weight_ih_l0
    if relay == "t_":
        weight.data.t_()
        with torch.no_grad():
            weight.t_()
    elif relay == "data":
        weight.data = weight.data.t()
    else:
        with torch.no_grad():
            weight.set_(weight.untyped_storage(), 0, (32, 32), (1, 32))
    assert not weight.is_contiguous()
    assert_now(layer, x)


def test_a_shared_weight_is_seen_however_it_is_written():
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(I, H).share_memory(), torch.randn(1, 1, I)
    for _ in range(3):
        assert_now(layer, x)
    context = torch.multiprocessing.get_context("spawn")
    other = context.Process(target=by_data_copy, args=(layer,))
    other.start()
    other.join()
    assert other.exitcode == 0
    assert_now(layer, x)


def test_weights_made_in_inference_mode():
    torch.manual_seed(0)
    with torch.inference_mode():
        layer, x = fastlstm.LSTM(I, H), torch.randn(1, 1, I)
        for _ in range(3):
            assert_now(layer, x)
            assert_now(layer, x)
            layer.weight_hh_l0.view(-1)[3] += 1
            layer.bias_hh_l0.numpy()[2] += 1


def one_value(layer):
    layer.weight_ih_l0.data[700, 3] += 1


@pytest.mark.parametrize("is_all", [True, False])
def test_one_value_of_shared_weights_is_seen_at_once(is_all):
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(300, 300), torch.randn(1, 1, 300)
    for p in layer.parameters() if is_all else [layer.weight_ih_l0]:
        p.share_memory_()
    for _ in range(3):
        assert_now(layer, x)
        one_value(layer)


@pytest.mark.parametrize("rest_is_fused", [True, False])
def test_one_value_that_a_fused_optimizer_changes_is_seen_at_once(rest_is_fused):
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(300, 300), torch.randn(1, 1, 300)
    first, *rest = layer.parameters()
    groups = [{"params": [first], "fused": True}, {"params": rest, "fused": rest_is_fused}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    first.grad = torch.zeros_like(first)
    first.grad[700, 3] = 1
    for _ in range(3):
        for _ in range(3):
            assert_now(layer, x)
        optimizer.step()


def test_a_write_to_the_last_value_of_weights_with_gaps():
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(I, H), torch.ones(1, 1, I)
    layer.weight_ih_l0 = nn.Parameter(torch.randn(4 * H, 3 * I)[:, :I])
    for _ in range(3):
        for _ in range(3):
            assert_now(layer, x)
        layer.weight_ih_l0.data[-1, -1] += 1


def test_weights_are_kept_from_their_second_training_call_on(monkeypatch):
    packed = []
    pack = packed_weights._pack
    monkeypatch.setattr(packed_weights, "_pack", lambda *a: packed.append(a[3]) or pack(*a))
    layer = fastlstm.LSTM(I, H)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        state = None
        for _ in range(5):
            y, state = layer(torch.randn(1, 3, I), state)
        y.sum().backward()
        optimizer.step()
    assert packed == [False, False, True, True] * 2


def test_weights_packed_for_one_call_hold_no_memory():
    layer = fastlstm.LSTM(I, H)
    layer(torch.randn(1, 3, I))[0].sum().backward()
    for cache in packed_weights._PACKED:
        assert cache[layer.weight_hh_l0].memory.numel() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_write_while_weights_are_packed_is_seen_by_the_next_call(shape, monkeypatch):
    torch.manual_seed(0)
    layer, x = fastlstm.LSTM(I, H), torch.randn(*SHAPES[shape], I)
    pack, writes = packed_weights._pack, iter([by_data_mul] * 2)

    def pack_and_write(*args):
        pack(*args)
        next(writes, lambda _: None)(layer)  # another thread, before the call is over

    monkeypatch.setattr(packed_weights, "_pack", pack_and_write)
    with torch.no_grad():
        for _ in range(2):  # the second one may make it ready, and pack
            layer(x)
        assert_now(layer, x)
    assert next(writes, None) is None


def test_a_saved_layer_holds_no_packed_weights():
    layer, x = fastlstm.LSTM(I, H), torch.randn(1, 1, I)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    by_data_mul(other)
    assert_now(other, x)
    assert_now(layer, x)
