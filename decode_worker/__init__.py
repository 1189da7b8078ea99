"""The role decode: which sequences the next step continues. Pure; `worker/` runs it."""
