"""Norms in plain PyTorch."""
