"""The console: a page that shows the mesh, controls its models and tries them out
(docs/console.md).

`app` answers `/` and `/console/…` and passes all other requests to the edge's application; `access`
decides which requests are from a page of the console; `hub` watches the mesh once for all pages;
`board` and `changes` compute the shown state without side effects; `files` serves the page itself.
"""

from services.edge.console.app import ConsoleApp

__all__ = ["ConsoleApp"]
