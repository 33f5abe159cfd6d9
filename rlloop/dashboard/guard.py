"""The door: who has the token may read, and nobody may do more than read."""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Guard:
    """Lets in who has the token: as `?token=`, which becomes a cookie, or as `Authorization: Bearer`. Only GET."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self.app, self.token, self.cookie = app, token, cookie

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
