"""What a router knows of the mesh (`view.py`) and of the speed of its lanes (`pace.py`), and work
that outlives its call (`background.py`). It answers no call itself."""
