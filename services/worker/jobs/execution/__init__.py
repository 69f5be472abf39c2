"""Running jobs on the device.

`runner.py` is the device thread, `oom_recovery.py` recovers from failed forward passes, `dedup.py`
skips outputs that are known, and `device_time.py` counts the time in which the device was idle.
"""
