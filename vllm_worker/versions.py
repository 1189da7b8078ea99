"""The versions of vLLM that workers run, and what differs between them.

Workers use interfaces that vLLM calls experimental, so other versions are refused. `python -m tools.vllm_signatures`
tells what differs in a newer one.
"""

from __future__ import annotations

import importlib.metadata

DEFAULT_VERSION = "0.32.0"
SUPPORTED_VERSIONS = ("0.31.0", DEFAULT_VERSION)


def installed_version() -> str:
    """Returns the version of vLLM in this environment, without the suffix of its build."""
    return importlib.metadata.version("vllm").partition("+")[0]


def draws_seeds_on_cpu() -> bool:
    """Whether a request's generator draws one number for each sampled token on CPUs, a seed of its noise.

    vLLM 0.31 draws the noise of the whole vocabulary from it, as on GPUs.
    """
    return installed_version() != "0.31.0"


def block_version(device: str) -> str:
    """Returns the oldest version whose blocks of KV have the numbers in the same places as those of this version.

    Workers of both versions can then take each other's blocks. On GPUs, where this has not been tried, only workers of
    one version can; so it is with vLLM's own NIXL connector.
    """
    version = installed_version()
    return "0.31.0" if device == "cpu" and version in SUPPORTED_VERSIONS else version
