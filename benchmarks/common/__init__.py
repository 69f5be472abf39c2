"""What several benchmarks share: texts, the processes that are measured, the machine, and what is
reported.
"""
