"""Mixture of experts in plain PyTorch."""
