"""Random writes to the weights of a layer, by every route that torch and NumPy offer.

`campaign` compares a layer of ours with torch's own after each of them.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fastlstm

Write = Callable[[nn.LSTM, str, slice, float], None]


def flat(layer, name):
    """The values of a weight in a row, by `.data`; of a copy where they do not lie so."""
    return layer._parameters[name].data.view(-1)


def by_data(layer, name, at, value):
    flat(layer, name)[at] += value


def by_index(layer, name, at, value):
    places = torch.arange(at.start, at.stop)
    layer._parameters[name].data.view(-1).index_fill_(0, places, value)


def by_scatter(layer, name, at, value):
    flat(layer, name).scatter_(0, torch.arange(at.start, at.stop), value)


def by_mask(layer, name, at, value):
    values = flat(layer, name)
    mask = torch.zeros_like(values, dtype=torch.bool)
    mask[at] = True
    values.masked_fill_(mask, value)


def by_strided_view(layer, name, at, value):
    layer._parameters[name].data.as_strided((at.stop - at.start,), (1,), at.start).mul_(1 + value)


def by_detached(layer, name, at, value):
    layer._parameters[name].detach().view(-1)[at].fill_(value)


def by_numpy(layer, name, at, value):
    layer._parameters[name].detach().numpy().reshape(-1)[at] -= value


def by_numpy_copyto(layer, name, at, value):
    np.copyto(np.asarray(flat(layer, name))[at], np.float32(value))


def by_numpy_dlpack(layer, name, at, value):
    np.from_dlpack(layer._parameters[name].detach()).reshape(-1)[at] = value


def by_torch_dlpack(layer, name, at, value):
    torch.from_dlpack(layer._parameters[name].detach()).view(-1)[at] += value


def by_from_numpy(layer, name, at, value):
    torch.from_numpy(flat(layer, name).numpy())[at].copy_(torch.tensor(value))


def by_buffer(layer, name, at, value):
    torch.frombuffer(memoryview(flat(layer, name).numpy()), dtype=torch.float32)[at] += value


def by_bytes(layer, name, at, value):
    """The sign of a value."""
    flat(layer, name).view(torch.uint8)[4 * at.start + 3] ^= 0x80


def by_storage(layer, name, at, value):
    parameter = layer._parameters[name]
    memory = parameter.untyped_storage()
    memory[4 * (parameter.storage_offset() + at.start) + 3] ^= 0x80


def by_address(layer, name, at, value):
    address = layer._parameters[name].data_ptr() + 4 * at.start
    ctypes.c_float.from_address(address).value = value


def by_memmove(layer, name, at, value):
    values = np.full(at.stop - at.start, value, np.float32)
    address = layer._parameters[name].data_ptr() + 4 * at.start
    ctypes.memmove(address, values.ctypes.data, values.nbytes)


def by_no_grad(layer, name, at, value):
    with torch.no_grad():
        layer._parameters[name].view(-1)[at] += value


def by_inference_mode(layer, name, at, value):
    with torch.inference_mode():
        layer._parameters[name].view(-1)[at] += value


def by_set(layer, name, at, value):
    data = layer._parameters[name].data
    other = data.clone()
    other.view(-1)[at] += value
    layer._parameters[name].data.set_(other)
    layer._parameters[name].data = other


def by_new_data(layer, name, at, value):
    """What lay in the same memory before may be gone."""
    values = layer._parameters[name].detach().numpy().copy()
    layer._parameters[name].data = torch.empty(0)
    values.reshape(-1)[at] += value
    layer._parameters[name].data = torch.from_numpy(values).clone()


def by_new_parameter(layer, name, at, value):
    other = layer._parameters[name].detach().clone()
    other.view(-1)[at] += value
    setattr(layer, name, nn.Parameter(other))


def by_state_dict(layer, name, at, value):
    layer.state_dict()[name].view(-1)[at] += value


def by_load(layer, name, at, value):
    state = {key: p.clone() for key, p in layer.state_dict().items()}
    state[name].view(-1)[at] += value
    layer.load_state_dict(state, assign=value > 0)


def by_vector(layer, name, at, value):
    vector = parameters_to_vector(layer.parameters()).detach().clone()
    vector[at] += value
    vector_to_parameters(vector, layer.parameters())


def by_optimizer(layer, name, at, value):
    parameter = layer._parameters[name]
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad.view(-1)[at] = value
    kind = torch.optim.SGD if value > 0 else torch.optim.Adam
    kind([parameter], lr=0.05, fused=abs(value) > 0.5).step()
    parameter.grad = None


def by_flat_weights(layer, name, at, value):
    layer._flat_weights[layer._flat_weights_names.index(name)].data.view(-1)[at] += value


def by_swap(layer, name, at, value):
    values = flat(layer, name)
    values.copy_(values.roll(at.stop - at.start))


def by_everything(layer, name, at, value):
    for parameter in layer.parameters():
        parameter.data.mul_(1 + 0.1 * value)


WRITES: list[Write] = [value for name, value in sorted(globals().items()) if name[:3] == "by_"]


def same_layer(layer):
    """Torch's own with the values that the weights have now."""
    sizes = layer.input_size, layer.hidden_size, layer.num_layers
    twin = nn.LSTM(*sizes, bidirectional=layer.bidirectional)
    twin.load_state_dict(layer.state_dict())
    return twin


def random_layer(rng):
    """A layer of any kind; every third one is large."""
    most = 150 if rng.random() < 1 / 3 else 24
    sizes = rng.randint(1, most), rng.randint(1, most)
    num_layers, bidirectional = rng.choice([(1, False)] * 3 + [(2, False), (1, True), (2, True)])
    return fastlstm.LSTM(*sizes, num_layers, bidirectional=bidirectional)


def random_write(layer, rng):
    """Writes one value, some, or all of a weight; returns what was done."""
    name = rng.choice(layer._flat_weights_names)
    size = layer._parameters[name].numel()
    count = rng.choice([1, 1, 1, min(size, 7), size])
    first = rng.randint(0, size - count)
    value = rng.choice([-1, 1]) * rng.uniform(0.1, 1) / (10 if count == size else 1)
    write = rng.choice(WRITES)
    write(layer, name, slice(first, first + count), value)
    return f"{write.__name__} of {count} at {first} of {name} in {layer}"


def call(layer, x, hx, *, trains):
    """Returns the outputs, and with `trains` the gradients."""
    with torch.set_grad_enabled(trains):
        y, (h, c) = layer(x, hx)
    found = [y, h, c]
    if trains:
        found += torch.autograd.grad(y.square().sum() + c.sum(), list(layer.parameters()))
    return [t.detach() for t in found]


def campaign(num_writes, seed):
    """Raises AssertionError for a call that has not seen a write."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    done = 0
    while done < num_writes:
        layer = random_layer(rng)
        shapes = [(1, 1), (1, rng.randint(1, 8)), (rng.randint(1, 12), rng.randint(1, 8))]
        for _ in range(min(50, num_writes - done)):
            T, B = rng.choice(shapes)
            x = torch.randn(T, B, layer.input_size)
            rows = layer.num_layers * (2 if layer.bidirectional else 1)
            hx = (torch.randn(rows, B, layer.hidden_size), torch.randn(rows, B, layer.hidden_size))
            trains = rng.random() < 0.25
            for _ in range(rng.randint(0, 3)):
                call(layer, x, hx, trains=trains)
            what = random_write(layer, rng)
            got, want = (call(m, x, hx, trains=trains) for m in (layer, same_layer(layer)))
            for a, b in zip(got, want, strict=True):
                furthest = float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
                assert furthest < 2e-5, f"write {done} (seed {seed}) was not seen: {what}"
            done += 1
            if max(float(p.detach().abs().max()) for p in layer.parameters()) > 3:
                layer.reset_parameters()
