"""Gymnasium environments; importing this package registers them."""
