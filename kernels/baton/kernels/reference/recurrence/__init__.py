"""Recurrences with a state of fixed size, in plain PyTorch."""
