"""Fuzzers of a cluster: its sockets, its HTTP endpoint and raw connections."""
