"""The command line: `fastlstm <verb> <what> [--flags]`, one file per verb.

Nothing here imports torch before a verb needs it, so `--help` answers at once.
"""
