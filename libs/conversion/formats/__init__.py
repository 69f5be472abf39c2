"""Readers of published formats other than torch's, run in the child process: GGUF and ONNX files
become safetensors.
"""
