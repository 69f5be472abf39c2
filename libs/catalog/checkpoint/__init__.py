"""Parsers of a checkpoint's or an adapter's directory: bounded reading of JSON and safetensors
headers (`files.py`), and formats that several kinds of models share (`modules.json`, chat
templates) or that an adapter has. Formats of one kind are parsed in `libs/kinds`; no YAML is read
here."""
