"""Checks of the supply chain: pins, locks, vulnerabilities, licences, bills of materials and release
versions.
"""
