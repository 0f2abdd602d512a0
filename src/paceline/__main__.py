"""`python -m paceline`."""

import os
import sys

from paceline.cli.main import main
from paceline.launch import is_rank

if __name__ == "__main__":
    code = main()
    if is_rank():
        # A rank that failed leaves others in its process group; tearing gloo down without them may abort the process and
        # so hide its exit code. Everything is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
