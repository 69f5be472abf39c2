"""Stubs of KEDA's external scaler contract, generated from protos/externalscaler by `make
protos`.
"""
