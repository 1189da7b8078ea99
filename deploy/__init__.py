"""Starts, watches and stops a cluster. The only package that reads environment variables."""
