"""From prompts and parameters to requests of the gateway."""
