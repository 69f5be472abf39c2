"""The peers of the mesh: bare models in separate processes, OpenVINO, and the set-up of OpenVINO
and Infinity.
"""
