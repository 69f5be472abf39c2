"""Running jobs on the device: the one device thread (`runner.py`), recovery from forward passes
that fail (`ladder.py`), outputs that need not be computed again (`sparing.py`), and when the device
had to wait (`device_time.py`)."""
