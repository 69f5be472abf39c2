"""One module for each family of vision-language models: its tensor names, and its tower, connector
and prompts as data.
"""
