"""Linears on a CPU in plain PyTorch."""
