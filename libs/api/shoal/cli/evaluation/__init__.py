"""`shoal eval`: runs models of a mesh on queries, documents and judgements in files, and prints how
well they rank.

Order of reading: `data.py` (files), `running.py` (calls, search), `metrics.py` (numbers),
`report.py` (table, plot), `commands.py`.
"""
