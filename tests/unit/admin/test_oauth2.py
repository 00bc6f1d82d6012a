"""What an issuer's refusal may say in logs and statuses."""

from __future__ import annotations

import pytest
from aiohttp import web

from redrive.admin.errors import IssuerFailedError
from redrive.auth.oauth2 import Client, issue
from tests.unit.admin.test_http import asking


@pytest.mark.parametrize(
    ("error", "got"),
    [
        ("invalid_scope", "400 invalid_scope"),
        ("invalid_scope\n2026-11-22 INFO forged", "400"),
        ("s3cret-that-was-sent", "400"),
        ("a" * 41, "400"),
        ("", "400"),
        ({"secret": "s3cret"}, "400"),
        (None, "400"),
    ],
)
async def test_of_an_issuers_error_its_code_is_shown_and_nothing_else(
    error: object, got: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"token_endpoint": str(request.url.with_path("/token"))})
        return web.json_response({"error": error, "error_description": "s3cret"}, status=400)

    async with asking(answer) as (opened, url):
        with pytest.raises(IssuerFailedError, match=f"got '{got}'; check"):
            await issue(Client(url, "me", "s3cret"), opened)
