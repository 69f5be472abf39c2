"""This machine: the device, threads, models on its disk, and preemption notices of spot machines.
Independent of jobs and of the mesh.
"""
