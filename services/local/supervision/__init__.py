"""The child processes of a local mesh: how one is started and stopped, its environment, and when it
is restarted.

Here: what holds for any child process. Not here: which children a mesh has and in which order they
start (`mesh.py`), and the folder that they work in (`workplace.py`)."""
