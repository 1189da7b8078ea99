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
