"""`python -m fastlstm` is the `fastlstm` command."""

from fastlstm.cli.main import console

if __name__ == "__main__":
    console()
