"""Types and conversions that all dialects share: requests and answers, names of models and roles,
numbers, and parsing of bodies.
"""
