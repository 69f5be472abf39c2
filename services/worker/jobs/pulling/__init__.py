"""The path from a pull to a prepared job.

`pulls.py` decides which pulls to send and `puller.py` sends them; `intake.py` and `reading.py` read
the jobs; `preparing.py` and `document_costs.py` tokenise them in threads that callers share
fairly.
"""
