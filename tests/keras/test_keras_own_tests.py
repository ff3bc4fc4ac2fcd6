"""Keras' own tests of LSTM and Bidirectional, out of its wheel, with our layer in its place."""

import keras.src.layers
import pytest
from keras.src.layers.rnn import bidirectional_test, lstm_test

from fastlstm.keras import LSTM

pytestmark = pytest.mark.filterwarnings("default")  # those tests do not fail on warnings


@pytest.fixture(autouse=True)
def _ours(monkeypatch):
    monkeypatch.setattr(keras.src.layers, "LSTM", LSTM)
    monkeypatch.setattr(LSTM, "strict", True)  # no test is passed by Keras' own loop


class TestLSTM(lstm_test.LSTMTest):
    pass


class TestBidirectional(bidirectional_test.SimpleRNNTest):
    pass
