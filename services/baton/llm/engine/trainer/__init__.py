"""Weights that a trainer in another process sends: the meeting, what is sent, and how it moves."""
