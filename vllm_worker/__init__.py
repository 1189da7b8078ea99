"""A worker whose model runs in vLLM. Runs in an environment of its own, with vLLM's versions of torch and the rest."""
