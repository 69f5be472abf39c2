"""What benchmarks compute and claim; the measurements themselves are not run here."""
