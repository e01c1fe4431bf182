"""Activations in plain PyTorch."""
