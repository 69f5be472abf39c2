"""One module for each family of image models: its tensor names, and its towers as data."""
