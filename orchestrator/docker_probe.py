"""Asks the Docker engine questions with nothing but the standard library.

`scripts/docker-engine` needs an answer before any package is installed, the doctor also when packages are broken.
Sandboxes themselves use the Docker SDK (`sandboxes/docker.py`).

    python3 orchestrator/docker_probe.py     exit code 0 when an engine answers, else one line that says why not
"""

import http.client
import json
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

DEFAULT_HOST = "unix:///var/run/docker.sock"
TIMEOUT_S = 10.0


class ProbeError(Exception):
    """No engine answered, or it refused; the message says what to do."""


def ask(path: str) -> Any:
    """The decoded JSON (or text) that the engine at DOCKER_HOST answers to `GET path`. Raises `ProbeError`."""
    host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    try:
        connection = _connect(host)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read().decode(errors="replace")
        finally:
            connection.close()
    except PermissionError:
        raise ProbeError(
            f"no permission to use the Docker engine at {host}: run `sudo usermod -aG docker $USER`, then log in again"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ProbeError(f"no Docker engine answers at {host} ({reason})") from None
    if answer.status != http.HTTPStatus.OK:
        raise ProbeError(f"the Docker engine at {host} answers {path} with HTTP status {answer.status}: {body[:200]}")
    return json.loads(body) if answer.headers.get_content_type() == "application/json" else body


def _connect(host: str) -> http.client.HTTPConnection:
    scheme, _, address = host.partition("://")
    if scheme == "unix":
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(TIMEOUT_S)
        try:
            link.connect(address)
        except OSError:
            link.close()
            raise
        connection = http.client.HTTPConnection("docker", timeout=TIMEOUT_S)
        connection.sock = link
        return connection
    if scheme not in ("tcp", "http", "https"):
        raise ProbeError(f"DOCKER_HOST = {host!r} is not understood: use unix:// or tcp://")
    if scheme == "https" or os.environ.get("DOCKER_TLS_VERIFY"):
        folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        return http.client.HTTPSConnection(address.rstrip("/"), timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(address.rstrip("/"), timeout=TIMEOUT_S)


if __name__ == "__main__":
    try:
        ask("/_ping")
    except ProbeError as problem:
        sys.exit(str(problem))
