"""`python -m services.local` is `shoal up`."""

import typer

from services.local.command import up

if __name__ == "__main__":
    typer.run(up)
