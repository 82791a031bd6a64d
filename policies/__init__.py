"""Policies: adapters and networks, found by name through entry points."""
