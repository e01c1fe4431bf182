"""Parameters of a call, by the names of vLLM."""
