"""This machine: the device, threads, models on its disk, and preemption notices of spot machines.
Nothing here knows of jobs or of the mesh."""
