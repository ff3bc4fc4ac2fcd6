import torch

from fastlstm.training.averaging import WeightAverage


def test_average_follows_the_formula_and_swaps_in_and_out():
    layer = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.0)
    average = WeightAverage(layer, decay=0.5)
    for _ in range(3):
        with torch.no_grad():
            layer.weight.add_(1.0)
        average.update()
    expected = 0.0
    for n, weight in enumerate((1.0, 2.0, 3.0), start=1):
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * weight
    with average.applied():
        assert abs(layer.weight.item() - expected) < 1e-6
    assert layer.weight.item() == 3.0


def test_weights_come_back_after_an_error():
    layer = torch.nn.Linear(1, 1)
    before = layer.weight.item()
    average = WeightAverage(layer, decay=0.9)
    with torch.no_grad():
        layer.weight.add_(1.0)
    try:
        with average.applied():
            raise RuntimeError
    except RuntimeError:
        pass
    assert layer.weight.item() == before + 1.0


def test_weights_stay_where_they_are_while_averages_are_in_use():
    layer = torch.nn.Linear(1, 1)
    average = WeightAverage(layer, decay=0.9)
    place = layer.weight.data_ptr()  # cuDNN has the weights of a layer in one buffer
    with average.applied():
        assert layer.weight.data_ptr() == place
    assert layer.weight.data_ptr() == place
