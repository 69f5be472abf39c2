"""Commands of `make`: checks and generators of committed files. Nothing here is shipped.

`supply/` checks the supply chain; `k8s/` generates and renders manifests.
"""
