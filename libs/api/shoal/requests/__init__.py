"""Conversion of a verb's arguments to request messages, and of replies to results. Pure, except for
the array of a large answer.

`plan.py` is the interface, implemented for each inference verb. Messages, splitting and merging
belong here; when and to which router requests are sent does not.
"""
