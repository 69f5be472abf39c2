"""TEI's additional addresses: `prefix_app.py` for HTTP ports with a fixed model, `tei_grpc.py` for
`tei.v1` over gRPC.
"""
