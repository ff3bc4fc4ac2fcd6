"""`fastlstm serve`: a model behind the OpenAI API for text completions."""
