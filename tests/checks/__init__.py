"""Tests of `make check`'s tools other than linters and type checkers (tools/)."""
