"""What a request may cost before it is answered: who pays for its bytes, how a body is read, and
what decoding would create.
"""
