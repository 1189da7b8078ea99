"""Metrics, stages and request timelines."""
