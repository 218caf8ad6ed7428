"""The HTTP server: OpenAI-compatible, the engine in a process of its own."""
