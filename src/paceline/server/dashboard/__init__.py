"""The dashboard's page: files that a browser loads, without anything from elsewhere.

It polls ``/dashboard/data``. Relative addresses, so that a proxy may serve it under a prefix.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.responses import Response

_SCRIPTS = ("app", "axes", "bars", "charts", "dom", "format", "looks", "panels", "requests")
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in _SCRIPTS},
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, in no frame.
    "content-security-policy": (
        "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}
PATHS = frozenset({"/dashboard", "/dashboard/", *(f"/dashboard/{name}" for name in _TYPES)})


def pages() -> dict[str, Callable[[], Awaitable[Response]]]:
    """The endpoint of each of ``PATHS``; the page itself is at ``/dashboard/``."""
    found = {f"/dashboard/{name}": _page(name) for name in _TYPES}
    return {**found, "/dashboard/": found["/dashboard/index.html"], "/dashboard": _to_page}


async def _to_page() -> Response:
    return Response(status_code=307, headers={"location": "dashboard/"})


def _page(name: str) -> Callable[[], Awaitable[Response]]:
    content = (resources.files(__package__) / name).read_bytes()
    headers = {"content-type": _TYPES[name], **_HEADERS}

    async def page() -> Response:
        return Response(content, headers=headers)

    return page
