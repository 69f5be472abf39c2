"""One module for each family of image models: its tensors' names, and its towers as data."""
