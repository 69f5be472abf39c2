"""Vision-language models for retrieval: the rows of an image tower and its connector are inserted
among the tokens of a text encoder.
"""
