"""Updates of linears by adapters, in plain PyTorch."""
