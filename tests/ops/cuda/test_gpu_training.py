"""Dropout and embeddings of a training step on a GPU are torch's."""

import pytest
import torch

from fastlstm.nn.dropout import dropped
from fastlstm.ops.cuda.embedding import MAX_TABLE_ROWS, embedding
from fastlstm.ops.cuda.training import can_mask, masked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (7, 3, 40), (300, 5, 128), (128, 128, 512)])
def test_a_masked_product_has_the_bits_of_torchs(dtype, shape):
    x, dy = torch.randn(2, *shape, device="cuda", dtype=dtype)
    x[0, 0, 0] = float("nan")
    mask = (torch.rand(1, *shape[1:], device="cuda") < 0.7).to(dtype).div_(0.7)
    assert can_mask(x, mask)
    x.requires_grad_()
    y = masked(x, mask)
    assert torch.equal(y.nan_to_num(), (x * mask).nan_to_num())
    assert y[0, 0, 0].isnan()
    both = torch.stack([dy, dy])
    (batched,) = torch.autograd.grad(y, x, both, is_grads_batched=True, retain_graph=True)
    assert torch.equal(batched, both * mask)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert torch.equal(dx, dy * mask)
    assert torch.equal(torch.autograd.grad(masked(x, mask), x, dy)[0], dy * mask)


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 4, 8)])
def test_a_mask_that_cannot_be_read_is_torchs_product(shape):
    x = torch.ones(shape[0] + 1, *shape[1:], device="cuda", dtype=torch.bfloat16)[1:]
    plain = torch.ones(1, *shape[1:], device="cuda", dtype=torch.bfloat16)
    assert can_mask(x, plain) == (shape == (4, 4, 8))
    assert not can_mask(x.transpose(0, 2), plain.transpose(0, 2))
    assert not can_mask(x, plain.float())
    assert not can_mask(x, plain[:, :1])
    assert not can_mask(x[:, :0], plain[:, :0])
    assert dropped(x.float(), 0.5, (1, *shape[1:])).shape == x.shape


@pytest.mark.parametrize("num_rows", [2, 100, MAX_TABLE_ROWS, MAX_TABLE_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_and_gradient_of_a_table(num_rows, dtype):
    table = torch.randn(num_rows, 24, device="cuda", requires_grad=True)
    tokens = torch.randint(num_rows, (13, 9), device="cuda")
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
        rows = embedding(tokens, table)
    want = torch.nn.functional.embedding(tokens, table)
    small = dtype is not torch.float32 and num_rows <= MAX_TABLE_ROWS
    assert torch.equal(rows.float(), want.to(dtype).float() if small else want)
    d = torch.randn_like(rows)
    both = torch.stack([d, d])
    (batched,) = torch.autograd.grad(rows, table, both, is_grads_batched=True, retain_graph=True)
    assert batched.shape == (2, *table.shape)
    for create_graph in (False, True):
        (got,) = torch.autograd.grad(rows, table, d, create_graph=create_graph, retain_graph=True)
        (exact,) = torch.autograd.grad(want, table, d.float(), retain_graph=True)
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)
