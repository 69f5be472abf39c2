"""Wires of models that write: OpenAI's chat and completions, Ollama's chat and generate. They share
`along.py` and `choices.py`.
"""
