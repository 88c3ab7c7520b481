"""The page at `/`: a playground that shows speculation happening.

Four files of the package, which use the public endpoints only. They hold nothing secret, so they
need no API key: a browser could not send one. The page asks for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

FOLDER = Path(__file__).parent.with_name("static")
FILES = {  # path → file and media type
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Cache-Control": "no-cache",  # ask every time; the answer is mostly 304
    # Nothing from elsewhere is loaded, and no text can become markup (`innerHTML` throws).
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " object-src 'none'; require-trusted-types-for 'script'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_router() -> APIRouter:
    router = APIRouter()
    for path, (name, media_type) in FILES.items():
        endpoint = _file(FOLDER / name, media_type)
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _file(path: Path, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = path.read_bytes()
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in (part.strip().removeprefix("W/") for part in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return serve
