"""Benchmarks: `python -m bench.NAME [--quick] [--json FILE]`; see bench/README.md."""
