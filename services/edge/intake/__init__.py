"""Bound the cost of a request before it is answered: who pays for its bytes, how its body is read,
and the number of objects that decoding would create.
"""
