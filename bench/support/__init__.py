"""Parts that the benchmarks share: reports, latency figures, servers, polling, images, process figures."""
