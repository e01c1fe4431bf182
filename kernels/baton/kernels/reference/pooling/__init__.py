"""Pooling in plain PyTorch."""
