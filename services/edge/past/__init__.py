"""What an edge remembers of the last hour, in a bounded part of its memory, for the console
(docs/console.md).

`cost` is what one request asked and used; `history` keeps steps of ten seconds and the last
requests, without any text of callers.
"""
