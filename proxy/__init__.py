"""The HTTP front end: OpenAI schema, rendering, routing, admission, streams. Loads no weights and no torch."""
