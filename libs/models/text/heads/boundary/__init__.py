"""GLiNER2.5: spans by where they start and end. The processor that reads the head's output:
`processing/boundary/`.
"""
