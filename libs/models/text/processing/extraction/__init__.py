"""Code that the processors of GLiNER, GLiNER2 and GLiREL share: words and spans."""
