"""Doing: one episode, all episodes, what crosses between processes, and what is recorded."""
