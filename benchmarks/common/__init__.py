"""Code shared by several benchmarks: texts, the measured processes, the machine, and reports."""
