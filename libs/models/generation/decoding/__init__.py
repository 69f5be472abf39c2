"""The decode loop: prefill and decode steps of sequences that join and leave, over paged keys and
values.
"""
