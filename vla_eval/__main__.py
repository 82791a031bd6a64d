"""`python -m vla_eval` is `vla-eval`."""

from vla_eval.cli import main

if __name__ == "__main__":
    main()
