"""Code that the heads of GLiNER, GLiNER2, GLiREL and detectors share: words, spans and labels."""
