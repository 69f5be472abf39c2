"""From a pull to a prepared job: which pulls are in flight (`pulls.py`, `puller.py`), reading what
they bring (`intake.py`, `reading.py`), and tokenising it in threads that callers share fairly
(`preparing.py`, `document_costs.py`)."""
