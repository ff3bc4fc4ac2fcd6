import torch

from fastlstm.training.guard import NonFiniteGuard, bad_gradient, bad_weight, first_non_finite


def test_the_first_bad_tensor_is_named():
    good, bad = torch.ones(3), torch.tensor([1.0, float("nan")])
    assert first_non_finite([("a", good), ("b", bad), ("c", bad)]) == "b"
    assert first_non_finite([("a", good), ("n", torch.tensor([1, 2]))]) is None


def test_weights_and_gradients_by_name():
    layer = torch.nn.Linear(2, 2)
    assert bad_weight(layer) is None
    layer.bias.grad = torch.tensor([float("inf"), 0.0])
    assert bad_gradient(layer) == "bias"
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    assert bad_weight(layer) == "weight"


def test_five_in_a_row_ask_for_a_roll_back_and_four_roll_backs_stop():
    guard = NonFiniteGuard()
    assert [guard.bad_step(n, "loss") for n in range(5)] == [False] * 4 + [True]
    guard.good_step()
    assert not guard.bad_step(9, "loss")
    assert [guard.roll_back() for _ in range(4)] == [False, False, False, True]
    assert guard.culprits[-1] == "step 9: loss"
