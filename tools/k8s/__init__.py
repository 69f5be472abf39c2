"""What `k8s/` and `charts/` have of other files, the schemas they are checked by, and the programs
that render them.
"""
