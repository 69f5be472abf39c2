"""Checks of the supply chain: pins, locks, vulnerabilities, licences, SBOMs and versions."""
