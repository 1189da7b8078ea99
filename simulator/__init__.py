"""The real cluster in simulated time: real workers and proxies between simulated networks, engines and data paths.

After FoundationDB (Zhou et al., SIGMOD 2021, section 4) and TigerBeetle's VOPR. `simulator.run` runs one seed.
"""
