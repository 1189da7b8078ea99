"""Number of servers that keep a queue short, by the M/M/c model (Erlang, 1917). Independent of Tandem."""

from __future__ import annotations

import math


def wait_probability(num_servers: int, load: float) -> float:
    """Erlang C: probability that a customer waits. load: arrival rate times mean service time, in servers."""
    if load >= num_servers:
        return 1.0
    blocking = 1.0  # Erlang B by its recursion, which does not overflow
    for servers in range(1, num_servers + 1):
        blocking = load * blocking / (servers + load * blocking)
    return blocking / (1 - load / num_servers * (1 - blocking))


def late_fraction(num_servers: int, load: float, service_s: float, max_wait_s: float) -> float:
    """Fraction of customers that waits longer than `max_wait_s` before service."""
    if load >= num_servers:
        return 1.0
    if service_s <= 0:
        return 0.0
    return wait_probability(num_servers, load) * math.exp(-(num_servers - load) * max_wait_s / service_s)


def mean_wait_s(num_servers: int, load: float, service_s: float) -> float:
    """Mean time that a customer waits before service; infinite if the servers cannot keep up."""
    if load >= num_servers:
        return math.inf
    return wait_probability(num_servers, load) * service_s / (num_servers - load)


def servers_needed(load: float, service_s: float, max_wait_s: float, most_late: float, most: int) -> int:
    """Fewest servers, at most `most`, with which at most the fraction `most_late` of customers waits too long."""
    for num_servers in range(max(1, math.ceil(load)), most):
        if late_fraction(num_servers, load, service_s, max_wait_s) <= most_late:
            return num_servers
    return most
