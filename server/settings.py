"""Settings of the server, read from DASH_* environment variables."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from server.params import Count, GpuName


class Settings(BaseSettings):
    """What a deployment may choose. Every field is DASH_<NAME> in the environment.

    ``token`` and ``tokens_file`` allow POST; without either the service is read-only. ``default_gpu`` answers calls that
    name no GPU. ``serve_release`` pins GPUs to an older release: {"h200": 3} answers as if no later one were there.
    ``root_path`` is the prefix that a proxy strips, for instance ``/dash``.
    """

    model_config = SettingsConfigDict(env_prefix="DASH_", env_ignore_empty=True, extra="ignore")

    db: str | None = None
    read_only: bool = False
    token: SecretStr | None = None
    tokens_file: str | None = None
    default_gpu: GpuName | None = None
    serve_release: dict[GpuName, Count] = Field(default_factory=dict)
    root_path: str = Field(default="", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    query_seconds: float = Field(default=30.0, gt=0, le=3600)
    cors_origins: list[str] = Field(default_factory=list)
    retry_after_s: int = Field(default=5, ge=1)
    log: Literal["text", "json"] = "text"
    log_requests: bool = False
