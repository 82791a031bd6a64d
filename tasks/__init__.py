"""Suites and protocols: which tasks there are, and under which rules they are scored."""
