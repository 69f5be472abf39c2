"""Convert office documents, web pages, books and e-mail to Markdown.

The process of `child.py` runs this package, under its limits of memory and processor time. The
modules import no other Shoal module. `sniffing.py` is also used outside that process: it searches
bytes and parses nothing.
"""
