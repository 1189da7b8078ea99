"""The environment of workers with GPUs: NCCL's network interface, GPUs that workers share, CUDA's queues, cuBLAS.

By itself NCCL picks any interface of the host.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address

import psutil

from tandem.runtime.errors import ConfigError

EXACT_PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Variables that leave cuBLAS no memory for products that are split along the sum, as it splits those of few rows.

With --exact, a row's bits must not depend on how many rows the product has. Both are read when torch first multiplies.
`engine.cuda.exact_products` checks that they suffice.
"""


def nccl_environment(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make NCCL listen and connect on the interface that has the address `host`, and the others.

    A variable that the operator has set in `environment` keeps its value. NCCL takes an interface, not an address: on
    an interface with several addresses of one family it uses the first. Raises ConfigError for an address that no
    interface of this host has.
    """
    found = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # workers may share a GPU
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # streams of one hardware queue wait for each other; the default is 8
    }
    if "NCCL_SOCKET_IFNAME" not in environment:
        interface, family = _interface_of(host)
        found |= {"NCCL_SOCKET_IFNAME": f"={interface}", "NCCL_SOCKET_FAMILY": family.name}  # without = it is a prefix
    return {name: value for name, value in found.items() if name not in environment}


def _interface_of(host: str) -> tuple[str, socket.AddressFamily]:
    """Returns the name of the interface and the family of the address. Loopback addresses are all on one interface."""
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"the address {host!r} of this host cannot be resolved: {error.strerror}") from error
    interfaces = psutil.net_if_addrs()
    for family, *_, address in resolved:
        wanted = ip_address(str(address[0]).partition("%")[0])
        for name, entries in interfaces.items():
            for entry in entries:
                if entry.family != family:
                    continue
                own = ip_address(entry.address.partition("%")[0])  # without a link-local address's scope
                if own == wanted or (own.is_loopback and wanted.is_loopback):
                    return name, family
    raise ConfigError(
        f"no network interface of this host has the address {host}; give one of its addresses, or name the interface "
        "that NCCL must use in the environment variable NCCL_SOCKET_IFNAME"
    )
