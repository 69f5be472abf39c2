"""The decode loop: prefill and decode steps of sequences that join and leave, over keys and values
in pages.
"""
