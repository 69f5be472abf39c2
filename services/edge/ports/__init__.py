"""Addresses of TEI's besides the edge's own: `doors.py`, HTTP ports that are one model's, and
`tei_grpc.py`, `tei.v1` over gRPC.
"""
