"""The engine in this process, and what it is made of."""
