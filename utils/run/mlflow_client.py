"""MLflow's package, set up to be harmless: no statistics for its makers, short waits, bounded answers, one server."""

from __future__ import annotations

import importlib.util
import os
from typing import Any
from urllib.parse import urlsplit

from utils.common.errors import UsageError, printable

MOST_ANSWER_BYTES = 4 << 20
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",  # seconds, for a connection and for the next bytes of an answer
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD": "false",
    "MLFLOW_TRACKING_INSECURE_TLS": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_TRACKING_AUTH": "bounded answers",
}


def checked_uri(text: str, name: str) -> str:
    """Return a server's address. Raises UsageError, which names `name`, for any other text, and without MLflow's package."""
    if "@" in text:
        raise UsageError(
            f"{name}: the address holds a user or a password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_address = is_address and not parts.query and not parts.fragment
    except ValueError:
        is_address = False
    if not is_address or not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(f"{name} {printable(text)}: expected a server's address such as http://127.0.0.1:5000")
    if importlib.util.find_spec("mlflow") is None:
        raise UsageError(f"{name}: MLflow's package is not installed: pip install -r requirements-mlflow.txt")
    return text.rstrip("/")


def import_library() -> Any:
    """Import MLflow's package, quiet and bounded. Takes a second or two."""
    if not os.environ.get("MLFLOW_TRACKING_TOKEN", "").isprintable():  # requests would show it in its error
        raise UsageError("MLFLOW_TRACKING_TOKEN: holds a character that no HTTP header may hold, such as a line break")
    os.environ.update(SETTINGS)
    if "SSL_CERT_FILE" in os.environ:
        os.environ.setdefault("MLFLOW_TRACKING_SERVER_CERT_PATH", os.environ["SSL_CERT_FILE"])
    # Here and not in the thread: a loader process that is forked during an import could wait for it without end.
    import mlflow.store.artifact.mlflow_artifacts_repo
    import mlflow.tracking.request_auth.registry
    import mlflow.tracking.request_header.registry

    methods = mlflow.tracking.request_auth.registry._request_auth_provider_registry
    if not any(isinstance(method, _BoundedAnswers) for method in methods):
        methods.register(_BoundedAnswers)
    return mlflow


class _BoundedAnswers:
    """Bounds the size of each answer and refuses redirects. MLflow takes it for a method of authentication (its plug-ins)."""

    def get_name(self) -> str:
        return SETTINGS["MLFLOW_TRACKING_AUTH"]

    def get_auth(self) -> Any:
        return self

    def __call__(self, request: Any) -> Any:
        request.register_hook("response", self._read)  # it is called before the answer's content is read
        return request

    def _read(self, answer: Any, **_: object) -> None:
        if answer.is_redirect:
            server = printable(urlsplit(answer.headers["Location"]).netloc.rpartition("@")[2])
            raise OSError(f"HTTP {answer.status_code} redirects to {server or 'another page'}; not followed")
        content = bytearray()
        for part in answer.iter_content(64 << 10):
            content += part
            if len(content) > MOST_ANSWER_BYTES:
                raise OSError(f"an answer is longer than {MOST_ANSWER_BYTES >> 20} MiB")
        answer._content = bytes(content)
