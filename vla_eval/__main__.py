"""`python -m vla_eval` is `vla-eval`."""

import sys

from vla_eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
