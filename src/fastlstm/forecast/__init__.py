"""Forecasters of tables: data, training, forecasts."""
