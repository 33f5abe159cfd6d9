"""The door: who has the token may read, and nobody may do more than read."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Guard:
    """Lets in who has the token: as `?token=`, which becomes a cookie, or as `Authorization: Bearer`. Only GET.

    `hosts`: names under which it may be asked for; None: any. A page from elsewhere whose name was made to point to
    this machine (DNS rebinding) sends its own name.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str, hosts: Collection[str] | None) -> None:
        self.app, self.token, self.cookie, self.hosts = app, token, cookie, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """None where the request may pass."""
        if request.method not in ("GET", "HEAD"):
            return Response("The dashboard only reads: GET or HEAD.\n", 405, {"allow": "GET, HEAD"})
        name = _without_port(request.headers.get("host", ""))
        if self.hosts is not None and name not in self.hosts:
            return Response(
                f"This dashboard is not asked for as {name!r}, but as {', '.join(self.hosts)}. Behind a proxy or under "
                f"a name of your own: rlloop dashboard --allow-host NAME.\n",
                403,
                media_type="text/plain",
            )
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/" and self._is_token(given):
            answer = RedirectResponse("/", 303)  # so that the token stays in no history, bookmark or screenshot
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="lax", max_age=30 * 86400)
            return answer
        bearer = request.headers.get("authorization", "").partition("Bearer ")[2]
        if self._is_token(request.cookies.get(self.cookie, "")) or self._is_token(bearer):
            return None
        return Response(
            "This dashboard asks for its token. Open the address that `rlloop dashboard` printed, which ends in "
            "?token=..., or send the header `Authorization: Bearer TOKEN`.\n",
            401,
            {"www-authenticate": "Bearer"},
            media_type="text/plain",
        )

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def _without_port(host: str) -> str:
    """`[::1]:80` -> `::1`; `Localhost:80` -> `localhost`"""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()
