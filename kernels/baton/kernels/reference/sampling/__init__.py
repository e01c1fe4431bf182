"""Sampling in plain PyTorch."""
