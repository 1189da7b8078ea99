"""Code shared by prefill and decode workers: engine lifetime, registration with the proxies, draining."""
