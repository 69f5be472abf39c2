"""Wires of models that write: OpenAI's chat completions, Ollama's chat and generate. `along.py` is what they share."""
