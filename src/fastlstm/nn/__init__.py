"""Modules: `fastlstm.LSTM`, its options and conversion, the layer of our models, and the loss."""
