"""The console: a page that shows the mesh, steers its models and tries them out (docs/console.md).

`app` answers `/` and `/console/…` and leaves all else to the edge's application; `access` says
which requests are a page's own; `hub` watches the mesh once for all pages; `board` and `changes`
are what it shows, without effects; `files` are the page itself.
"""

from services.edge.console.app import Console

__all__ = ["Console"]
