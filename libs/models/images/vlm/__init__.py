"""Vision-language models that retrieve: the rows of an image tower and its connector stand among
the tokens of a text encoder.
"""
