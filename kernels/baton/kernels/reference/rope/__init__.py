"""Rotary embeddings in plain PyTorch."""
