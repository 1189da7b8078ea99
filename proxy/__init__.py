"""The HTTP front door: OpenAI schema, rendering, routing, admission, streams. Loads no weights and no torch."""
