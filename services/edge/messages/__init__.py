"""What all dialects share: requests and answers, names of models and roles, numbers on the wire,
bodies that are read.
"""
