"""A few pairs of layers of campaigns/drop_in.py."""

import pytest

from campaigns import drop_in


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:accelerate replaced, but torch computes")
@pytest.mark.parametrize("group", range(4))
def test_random_layers_inputs_and_writes(group):
    for seed in range(10 * group, 10 * group + 10):
        assert drop_in.differences(seed) == []
