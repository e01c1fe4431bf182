"""What a call returns."""
