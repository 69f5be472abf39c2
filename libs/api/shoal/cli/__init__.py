"""The `shoal` command: code shared by all commands, and a folder for each group of commands. Only
this package imports typer or rich.

Code that a program can use without a terminal belongs in `shoal.client`.
"""
