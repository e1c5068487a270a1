"""Who may write: holders of the token. Without a configured token nobody may."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated

from fastapi import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from server.errors import ApiError
from server.settings import Settings

bearer = HTTPBearer(auto_error=False, description="The value of DASH_TOKEN on the server.")


def writer(settings: Settings, read_only: bool) -> Callable[..., None]:
    """Dependency: 403 when the database or the configuration takes no writes, 401 for a missing or wrong one, compared in constant time."""
    configured = settings.token.get_secret_value().strip() if settings.token else ""

    def check(
        given: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)] = None,
    ) -> None:
        if read_only:
            raise ApiError(
                403, "this server takes no writes; its database is open for reading only"
            )
        if not configured:
            raise ApiError(
                403, "this server takes no writes; set DASH_TOKEN where it runs to allow them"
            )
        offered = given.credentials if given else ""
        if not secrets.compare_digest(offered.encode(), configured.encode()):
            raise ApiError(
                401,
                "the token is missing or wrong; send Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": 'Bearer realm="dash"'},
            )

    return check
