"""A stranger's package: it imports what vla-eval documents and nothing else."""
