"""APIs of generative models: OpenAI's chat and completions, Ollama's chat and generate. They share
`common.py` and `choices.py`.
"""
