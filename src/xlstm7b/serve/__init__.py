"""An OpenAI-compatible server over the engine's slots."""
