"""A mesh on one machine: the compose file and the units of systemd
(docs/operations/single-machine.md).
"""
