"""One module for each kind of model (`Card.kind`), in rooms by what models of the kind do: it
recognises the kind's files and fills in the part of the Card that only this kind has. Formats that
several kinds share are in `checkpoint/`; the choice among the kinds, and what all cards have, is in
`detect.py`; the heads that compute a kind are in `libs/models/text/kinds/`."""
