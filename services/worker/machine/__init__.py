"""What this machine has: the device, threads, models on its disk, and notice that it will be taken away. Nothing here knows
of jobs or of the mesh."""
