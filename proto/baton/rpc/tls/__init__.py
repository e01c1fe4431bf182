"""Certificates of servers and channels: read, checked, and followed when their files change."""
