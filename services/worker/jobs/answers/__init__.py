"""From outputs to a router: answers are made (`finisher.py`), once more in float32 if they are not
finite (`widening.py`), returned under their leases (`delivery.py`), or in parts while a model still
writes (`written.py`)."""
