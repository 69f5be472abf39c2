"""The supply chain: pins and locks, known vulnerabilities, licences, bills of materials, and the
version of a release.
"""
