"""Composition: the CLI, configuration, process start, logs, and the tandem on one machine."""
