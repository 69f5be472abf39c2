"""Commands of `make`: checks, and what makes files that are committed. Nothing here is shipped."""
