"""Benchmarks that need a GPU; `bench.gpu.check` runs all of them."""
