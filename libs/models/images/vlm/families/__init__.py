"""One module for each family of vision-language models: its tensors' names, and its tower,
connector and prompts as data.
"""
