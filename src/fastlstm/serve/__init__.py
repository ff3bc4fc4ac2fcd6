"""`fastlstm serve`: text by OpenAI's completions API, forecasts by the Open Inference Protocol."""
