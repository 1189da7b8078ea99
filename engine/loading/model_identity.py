"""Identifies a checkpoint by its contents, so that workers with different weights never exchange KV caches.

Two hosts with separate copies must agree, so neither file times nor inodes count. Hashing hundreds of GB at every
start takes too long, so of each large tensor only three samples are hashed. Training, merging and quantising change
most values of the tensors that they change, and therefore the samples. An update in place is missed if it keeps every
tensor's name, type and shape and changes only bytes outside of the samples, such as a few rows of an embedding. Put
such an update into a new folder, or stop the whole cluster for it. Nothing here helps a worker that runs on CPU while
its files are overwritten: it maps them, so its weights change with them. Replace files by renaming new ones.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest, sha256
from pathlib import Path

FULL_HASH_BYTES = 256 << 20
"""Files of up to this size are hashed whole (about 0.2 s)."""
SAMPLE_BYTES = 4096
"""Bytes read at the start, in the middle and at the end of each tensor of a larger file; a page of the disk cache."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_NUM_THREADS = 8  # files read at once; the time is that of the disk or of the network


def hub_identity(name: str, commit: str) -> str:
    """Identity of a model of the hub at a commit. The hub's files are named by their contents, so they are not read."""
    return f"{name}@{commit}"


def folder_identity(folder: Path, *, with_weights: bool = True, with_code: bool = False) -> str:
    """Hashes the names and contents of the files in `folder` that determine the KV caches.

    These are the config; the weights (safetensors; without those, .bin files), their index and adapters; the model's
    Python code. Raises OSError, and ValueError for a large safetensors file without a valid header.
    """
    patterns = ["config.json"]
    if with_weights:
        suffix = "safetensors" if any(folder.glob("*.safetensors")) else "bin"
        patterns += [f"*.{suffix}", f"*.{suffix}.index.json", "adapter_config.json"]
    if with_code:
        patterns.append("*.py")
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        digests = list(threads.map(_file_digest, files))
    whole = sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(sha256(file.name.encode()).digest() + digest)
    return whole.hexdigest()[:32]


def dummy_identity(checkpoint: str, recipe: str) -> str:
    """Identity of random weights. checkpoint: identity of the config's source. recipe: what else determines them."""
    return f"{checkpoint}+{sha256(recipe.encode()).hexdigest()[:16]}"


def _file_digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        if file.suffix != ".safetensors" or file.stat().st_size <= FULL_HASH_BYTES:
            return file_digest(opened, "sha256").digest()
        return _sampled_digest(opened.fileno())


def _sampled_digest(fd: int) -> bytes:
    """Hashes the size, the header and the samples of a safetensors file. Raises ValueError for an invalid header."""
    size = os.fstat(fd).st_size
    header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"a safetensors file has a header of {header_bytes} bytes")
    header = os.pread(fd, header_bytes, 8)
    digest = sha256(size.to_bytes(8, "little") + header)
    first = 8 + header_bytes
    ranges = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
    for begin, end in sorted(ranges):
        for offset in sorted({begin, max(begin, (begin + end - SAMPLE_BYTES) // 2), max(begin, end - SAMPLE_BYTES)}):
            digest.update(os.pread(fd, min(SAMPLE_BYTES, end - offset), first + offset))
    return digest.digest()
