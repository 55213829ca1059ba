"""Options of every command that speaks to a running host: where it is, as whom, and how to tell the answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from adapters.client import Api
    from adapters.settings import Settings

ADMIN, APPROVER = "admin-token", "approver-token"


@Parameter(name="*", group="Host")
@dataclass(frozen=True, kw_only=True)
class Remote:
    """Where the host is and who asks."""

    url: Annotated[
        str, Parameter(help="Public listener of the host (default: that of the settings, http://127.0.0.1:8790).")
    ] = ""
    token_file: Annotated[
        Path | None, Parameter(help="File with the bearer token (default: the file of the state folder).")
    ] = None
    config: Annotated[Path | None, Parameter(help="Settings file; names listener and state folder.")] = None
    json: Annotated[bool, Parameter(help="Print the answer as JSON.")] = False

    def api(self, token_name: str = ADMIN) -> Api:
        """A client with the token of the given file, or of ``token_name`` in the state folder."""
        from adapters.client import Api
        from adapters.credentials import bearer_key

        return Api(self.origin(), bearer_key(self.token_file or self.state_dir() / token_name))

    def origin(self) -> str:
        """The public listener that was given, or that of the settings in force here: no token goes anywhere else."""
        if self.url:
            return self.url
        settings = self._settings()
        host = f"[{settings.public.host}]" if ":" in settings.public.host else settings.public.host
        return f"{'https' if settings.tls.cert_file else 'http'}://{host}:{settings.public.port}"

    def state_dir(self) -> Path:
        """The state folder of the settings in force here."""
        return self._settings().state.dir

    def _settings(self) -> Settings:
        from adapters.settings import load

        return load(self.config, os.environ)


HERE = Remote()


def group(name: str, help: str) -> App:  # noqa: A002
    """A command with sub-commands."""
    return App(
        name=name,
        help=help,
        help_format="plaintext",
        help_formatter="plain",
        version_flags=(),
        default_parameter=Parameter(negative=""),
    )
