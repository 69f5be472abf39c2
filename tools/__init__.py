"""Commands of `make`: checks, and what makes files that are committed. Nothing here is shipped.
`supply/` looks after the supply chain, `k8s/` after what `k8s/` and `charts/` have of other
files."""
