"""Flags and configuration keys of earlier versions, and what to do instead."""

from __future__ import annotations

REMOVED_FLAGS: dict[str, str] = {
    "later_priorities_part": "it is now --low-priority-share",
    **dict.fromkeys(
        [f"autoscale_{limit}{role}" for limit in ("", "min_", "max_") for role in ("prefill", "decode")],
        "limit all workers together with --autoscale-max-workers; one worker for each phase always stays",
    ),
    "autoscale_itl_ms": "it is now --itl-slo-ms, which workers keep too",
    "max_queue_s": "queued requests wait until --request-timeout-s; to refuse earlier, set --ttft-slo-ms",
    "max_waiting_tokens": "it is fixed at 16 million; the queue is limited by --max-waiting-requests",
    "max_connections_per_client": "one client address may use half of --max-connections",
    "client_timeout_s": "it is fixed at 30 s; leave it out",
    "max_waiting_media": "requests with media count towards --max-waiting-requests and have a fixed limit of 512",
    "max_fetched_media_mib": "it is fixed at 1024 MiB per proxy; to accept fewer items, set --max-media-items",
    "max_media_mib": "it is fixed at 64 MiB per item; bodies are limited by --max-body-mib",
    "max_image_mpixels": "it is fixed at 33.5 million pixels; scale larger images down",
    "max_video_mpixels": "it is fixed at 4,295 million pixels; cut longer videos",
    "max_video_frames": "32 frames are sampled from every video",
    "media_timeout_s": "it is fixed at 10 s; send media that takes longer to fetch as a data: URL",
    "media_decode_timeout_s": "it is fixed at 20 s; cut longer videos",
    "media_threads": "it follows the number of cores; for more, raise --proxies",
    "media_fetch_mib": "it is fixed at 1024 MiB per prefill worker; leave it out",
    "embedding_cache_mib": "it is fixed at 256 MiB per prefill worker; leave it out",
    "tokenizer_threads": "it follows the number of cores; for more, raise --proxies",
    "kv_lease_s": "it is fixed at 10 s; leave it out",
    "kv_checksums": "it is a debugging switch now: set the environment variable TANDEM_KV_CHECKSUMS=1",
    "process_silence_s": "it is fixed at 10 s; leave it out",
    "log_file_mib": "it is fixed at 64 MiB per log file, with one older file kept; leave it out",
    "metrics_host": "workers serve /metrics on --admin-host",
    "autoscale_down_after_s": "it is fixed at 120 s; leave it out",
    "ray_proxy_resource": "start the Ray nodes that may run proxies with --resources='{\"tandem_proxy\": 1}'",
}
"""Former name, as a key of the file, and the second half of a sentence for the error message."""
