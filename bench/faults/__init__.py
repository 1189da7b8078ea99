"""Benchmarks that inject faults or invalid input into a real cluster."""
