"""Turns images and videos into tensors, and says what stands for them in a prompt, with the model's HF processor.

Runs only in the sandboxes of the media process (`proxy.reading.media_process`), because the processor imports torch.
One thread may use it, because calls change its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from tandem.media_cache.media_segment import offsets_of
from tandem.protocol.messages.media import BYTES_PER_ELEMENT, MediaKind, MediaTensor
from tandem.proxy.media.decode import decode_image, decode_video, image_size, sampled, video_info
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import MediaSource
from tandem.runtime.errors import ConfigError, client_reason, first_line
from tandem.runtime.files.tokenizer_files import without_length_limits

_IDENTITY_FILES = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_TEXT_FEATURES = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets")
_MAX_VIDEO_FRAME_PIXELS = 768 * 28 * 28
"""Pixels per frame in the estimate of a video's size, which is corrected when the video is committed."""
_BYTES_PER_PIXEL = 12  # float32 RGB
_SIZE_SLACK_BYTES = 4096
_DECODING = 2
"""Increment with every change of the pixels that `proxy.media.decode` returns: cached tensors depend on it."""
_PROBE = Image.new("RGB", (224, 224))


class PreparedMedia(msgspec.Struct, frozen=True):
    """The description that the cache keeps beside an item's tensors.

    replacement: replaces the item's placeholder in the prompt; it contains num_tokens placeholder tokens.
    """

    replacement: str
    num_tokens: int
    tensors: tuple[MediaTensor, ...]


class MediaSize(msgspec.Struct, frozen=True):
    """An item's size from its header."""

    num_bytes: int
    """Expected size of the segment."""
    num_tokens: int
    """0 if unknown (video)."""
    num_pixels: int
    """Pixels of the decoded image, or of all sampled frames."""


class MediaProcessor:
    """placeholders, token_ids: text and token id of the placeholder by kind.

    Raises ConfigError if the model's processor takes no media.
    """

    def __init__(self, folder: Path, limits: MediaLimits, trust_remote_code: bool = False) -> None:
        self._limits = limits
        options = f"{version('transformers')} {_DECODING} {limits.max_video_frames} {limits.max_sampled_pixels}"
        identity = sha256(options.encode())
        for name in _IDENTITY_FILES:
            file = folder / name
            identity.update(name.encode() + (file.read_bytes() if file.is_file() else b""))
        self._identity = identity.digest()
        self._processor = processor = _load(folder, trust_remote_code)
        self.placeholders: dict[MediaKind, str] = {}
        kinds: tuple[MediaKind, ...] = ("image", "video")
        for kind in kinds:
            token = getattr(processor, f"{kind}_token", None)
            if token is not None and getattr(processor, f"{kind}_processor", None) is not None:
                self.placeholders[kind] = token
        made, base = type(processor), ProcessorMixin
        is_usual = made.get_text_with_replacements is base.get_text_with_replacements  # as `text.media_text` does it
        if not self.placeholders or not is_usual or made.replace_image_token is base.replace_image_token:
            raise ConfigError(
                f"the processor of {folder} ({type(processor).__name__}) is not supported for images or video"
            )
        self.token_ids: dict[MediaKind, int] = {
            kind: int(getattr(processor, f"{kind}_token_ids")[0]) for kind in self.placeholders
        }

    @cached_property
    def _bytes_per_patch(self) -> float:
        """Measured on a sample when it is first needed, in a sandbox: libraries start threads for it."""
        _, parts = self._prepare_image(_PROBE)
        num_patches = self._num_patches(_PROBE.height, _PROBE.width)[0]
        return sum(part.nbytes for part in parts) / max(1, num_patches)

    def digest(self, source: MediaSource, data: bytes, cache_salt: str) -> bytes:
        """Hashes all that determines the tensors: the bytes and the processor's files, version and options.

        cache_salt: equal items under different salts have different digests, so that no client can tell from its
        latency that another client has sent an item.
        """
        digest = sha256(self._identity + sha256(cache_salt.encode()).digest() + source.kind.encode())
        digest.update(data)
        return digest.digest()

    def size(self, source: MediaSource, data: bytes) -> MediaSize:
        """Reads the header only. Raises InvalidMedia."""
        if source.kind not in self.placeholders:
            raise source.refused(f"this model takes no {source.kind}s")
        if source.kind == "image":
            width, height = image_size(source, data, self._limits)
            with _processor_errors(source):
                num_patches, num_tokens = self._num_patches(height, width)
            return MediaSize(_with_slack(num_patches * self._bytes_per_patch), num_tokens, width * height)
        info = video_info(source, data, self._limits)
        num_frames = min(info.num_frames, self._limits.max_video_frames)
        num_pixels = min(info.width * info.height, _MAX_VIDEO_FRAME_PIXELS)
        num_bytes = _with_slack(num_frames * num_pixels * _BYTES_PER_PIXEL)
        return MediaSize(num_bytes, 0, min(num_frames * info.width * info.height, self._limits.max_sampled_pixels))

    def prepare(self, source: MediaSource, data: bytes) -> tuple[PreparedMedia, list[NDArray[Any]]]:
        """Decodes and processes the item. Returns its arrays in the order of `tensors`. Raises InvalidMedia."""
        with _processor_errors(source):
            if source.kind == "image":
                return self._prepare_image(decode_image(source, data, self._limits))
            return self._prepare_video(source, data)

    def _num_patches(self, height: int, width: int) -> tuple[int, int]:
        """Returns (patches, tokens) of an image of this size."""
        found = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(found["num_image_patches"][0]), int(found["num_image_tokens"][0])

    def _prepare_image(self, image: Image.Image) -> tuple[PreparedMedia, list[NDArray[Any]]]:
        return self._result("image", self._call("image", images=[image]))

    def _prepare_video(self, source: MediaSource, data: bytes) -> tuple[PreparedMedia, list[NDArray[Any]]]:
        limits, info = self._limits, video_info(source, data, self._limits)
        metadata = VideoMetadata(
            total_num_frames=info.num_frames,
            fps=info.fps,
            width=info.width,
            height=info.height,
            duration=info.duration_s,
            video_backend="pyav",
        )
        video_processor = self._processor.video_processor
        indices = sampled(info.num_frames, limits.max_video_frames)
        if getattr(video_processor, "do_sample_frames", False):  # the model's own sampling
            wanted = [int(index) for index in video_processor.sample_frames(metadata=metadata)]
            indices = [wanted[index] for index in sampled(len(wanted), limits.max_video_frames)]
        metadata.frames_indices = indices
        frames = decode_video(source, data, info, indices, limits)
        metadata.height, metadata.width = frames.shape[1:3]
        features = self._call("video", videos=[frames], video_metadata=[metadata], do_sample_frames=False)
        return self._result("video", features)

    def _call(self, kind: MediaKind, **media: Any) -> Any:
        return self._processor(
            text=[self.placeholders[kind]], return_tensors="pt", return_text_replacement_offsets=True, **media
        )

    def _result(self, kind: MediaKind, features: Any) -> tuple[PreparedMedia, list[NDArray[Any]]]:
        [[replaced]] = features["text_replacement_offsets"]
        num_tokens = int((features["input_ids"] == self.token_ids[kind]).sum())
        names = [name for name in features if name not in _TEXT_FEATURES]
        parts = [np.ascontiguousarray(np.asarray(features[name])) for name in names]
        offsets, _ = offsets_of([part.nbytes for part in parts])
        tensors = []
        for name, part, offset in zip(names, parts, offsets, strict=True):
            if part.dtype.name not in BYTES_PER_ELEMENT:
                raise ConfigError(
                    f"the model's processor returns {name} of type {part.dtype.name}, which is not supported"
                )
            tensors.append(MediaTensor(name, part.dtype.name, part.shape, offset, part.nbytes))
        return PreparedMedia(replaced["replacement"], num_tokens, tuple(tensors)), parts


def _load(folder: Path, trust_remote_code: bool) -> Any:
    """Raises ConfigError."""
    try:
        processor = AutoProcessor.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ConfigError(f"cannot read the processor of model {str(folder)!r}: {first_line(error)}") from error
    if tokenizer := getattr(processor, "tokenizer", None):
        without_length_limits(tokenizer)
    return processor


@contextmanager
def _processor_errors(source: MediaSource) -> Iterator[None]:
    """Raises InvalidMedia for an error of the processor, and MemoryError where torch raises a RuntimeError."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError) as error:
        if "can't allocate memory" in str(error):
            raise MemoryError(first_line(error)) from error
        raise source.refused(f"the model's processor cannot process it: {client_reason(error)[:160]}") from error


def _with_slack(num_bytes: float) -> int:
    return int(num_bytes) + _SIZE_SLACK_BYTES
