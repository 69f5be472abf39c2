"""The edge's record of the last hour, in bounded memory, for the console (docs/console.md).

`cost` is the work and usage of one request; `history` keeps steps of ten seconds and the last
requests, without callers' texts.
"""
