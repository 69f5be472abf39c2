"""Admission control: who may have how much (`tenants.py`), and whether a request of such a price is
admitted now (`controller.py` gathers, `control.py` decides). What is checked before is in
`validation/`, the choice of a lane in `routing/`. Most of it is pure; `lanes/` carries out what was
admitted."""
