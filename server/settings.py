"""Settings of the server, read from DASH_* environment variables."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What a deployment may choose. Every field is DASH_<NAME> in the environment.

    ``token`` allows POST; without one the service is read-only. ``default_gpu`` answers calls that name no GPU.
    ``root_path`` is the prefix that a proxy strips, for instance ``/dash``.
    """

    model_config = SettingsConfigDict(env_prefix="DASH_", env_ignore_empty=True, extra="ignore")

    db: str | None = None
    read_only: bool = False
    token: SecretStr | None = None
    default_gpu: str | None = None
    root_path: str = Field(default="", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    cors_origins: list[str] = Field(default_factory=list)
    retry_after_s: int = Field(default=5, ge=1)
