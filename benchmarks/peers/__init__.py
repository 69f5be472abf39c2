"""What the mesh is compared with: bare models in their own processes, OpenVINO, and the set-up of
OpenVINO and Infinity.
"""
