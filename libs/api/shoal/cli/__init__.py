"""The `shoal` command: what all commands share, and a folder for each group of commands. Only this
package imports typer or rich.

What a program can use without a terminal belongs in `shoal.client`.
"""
