"""KV blocks and their formats in plain PyTorch."""
