"""Spans: their context between services, and their export to a collector."""
