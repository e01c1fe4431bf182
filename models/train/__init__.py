"""Trains storyteller-7m further: long contexts, tool calls, JSON and reasoning, from text that it makes itself."""
