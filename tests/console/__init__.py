"""The console in a real browser: `make console-check` (not part of `make test`: it needs Chromium
and npm).
"""
