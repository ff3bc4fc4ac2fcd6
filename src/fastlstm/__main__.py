"""`python -m fastlstm` is the `fastlstm` command."""

from __future__ import annotations

import sys

from fastlstm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
