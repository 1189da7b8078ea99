"""What prefill and decode workers share: their engine's life, and their place among the proxies."""
