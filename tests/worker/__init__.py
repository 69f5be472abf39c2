"""The worker: the path of a job, memory, scheduling; models are fakes where they need not be
real.
"""
