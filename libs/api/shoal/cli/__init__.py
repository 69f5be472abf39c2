"""The `shoal` command. Nothing outside this package imports typer or rich."""
