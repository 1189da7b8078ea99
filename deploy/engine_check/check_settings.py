"""Settings of the clusters that `tandem engine check` starts."""

from __future__ import annotations

from typing import Any

SETTLED: dict[str, Any] = {
    "prefill": 0, "decode": 0, "workers": 0, "proxies": 1, "decode_prefill_threshold": 0,
    "served_model_name": "checked", "host": "127.0.0.1", "api_key": "", "api_keys_file": "",
    "admin_host": "127.0.0.1", "admin_keys_file": "", "ssl_certfile": "", "ssl_keyfile": "", "data_dir": "",
    "record": "", "otlp_endpoint": "", "max_requests_per_client": 0, "ttft_slo_ms": 0, "worker_wait_s": 3600.0,
    "request_timeout_s": 3600.0, "autoscale": False, "cluster_host": "", "network_keys": "", "join": "", "name": "",
    "ray": "", "kv_host_gib": 0, "kv_disk_dir": "", "kv_disk_gib": 0, "kv_store": "",
}  # fmt: skip
"""Settings that the check decides itself. Every prompt is handed over, and none is found in a tier below the pool."""
PORTS = ("port", "admin_port")
"""Settings that it chooses anew for each cluster."""
WITHOUT_EFFECT = (
    "autoscale_max_workers", "autoscale_ttft_ms", "cluster_port", "cors_origin", "insecure_network", "record_gib",
)  # fmt: skip
"""Settings that mean nothing beside those."""
NOT_OFFERED = (*SETTLED, *PORTS, *WITHOUT_EFFECT)
"""Settings without a flag of `tandem engine check`. A file with settings may have them; they are not used."""
