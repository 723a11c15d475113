"""The process that serves the pages: `python -m sparkdl.dashboard.server`, and recorded runs.

Anyone who knows the token can see them, as in Jupyter: it is in the URL once, then in a cookie.
Texts from nodes are never interpreted as HTML.

Why Bokeh? It keeps pages up to date from Python, without JavaScript to write, and users of Spark
know it from Dask. It accepts a WebSocket only from a page it has signed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.resources import Resources
from bokeh.server.auth_provider import AuthProvider
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders
from tornado.ioloop import IOLoop
from tornado.web import OutputTransform, RequestHandler
from tornado.websocket import WebSocketHandler

from sparkdl.core.errors import ConfigError
from sparkdl.core.world import host_port
from sparkdl.dashboard.pages import PAGES, Source
from sparkdl.driver.events import SUFFIX, Ask, event_of, line_of
from sparkdl.driver.history import Clusters

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self' ws: wss:; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'self' http://localhost:* "
        "http://127.0.0.1:* https:"
    ),
    "Referrer-Policy": "no-referrer",  # the token is in the URL
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_LOGIN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>sparkdl</title>
<h1>sparkdl</h1><p>This page needs the token: open the address that the launch has printed.</p>"""


class _Token(AuthProvider):
    """Authenticates requests by the token."""

    get_user_async = login_url = login_handler = logout_url = logout_handler = None

    def __init__(self, token: str) -> None:
        self._token = token
        # Named by the token: a browser sends the cookies of a host to all its dashboards.
        self._cookie = f"sparkdl-{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        super().__init__()

    def is_right(self, token: str | None) -> bool:
        # In constant time, so that the time of an answer gives nothing away.
        return token is not None and hmac.compare_digest(token.encode(), self._token.encode())

    def _user(self, handler: Any) -> str | None:
        if isinstance(handler, WebSocketHandler):
            return "page"  # Bokeh checks the signature that only a page has
        if self.is_right(handler.get_query_argument("token", None)):
            about: Any = {"httponly": True, "samesite": "Lax", "expires_days": 7}
            handler.set_cookie(self._cookie, self._token, **about)
            return "token"
        return "cookie" if self.is_right(handler.get_cookie(self._cookie)) else None

    @property
    def get_user(self) -> Callable[[Any], str | None]:
        return self._user

    @property
    def get_login_url(self) -> Callable[[Any], str]:
        return lambda handler: "login"


class _Login(RequestHandler):
    """Says where the address with the token is."""

    def get(self) -> None:
        self.set_status(403)
        self.finish(_LOGIN)


class _Root(RequestHandler):
    """Leads to the first page, wherever a proxy has put it."""

    def get(self) -> None:
        query = f"?{self.request.query}" if self.request.query else ""
        here = self.request.path.rstrip("/").rpartition("/")[2]
        is_folder = self.request.path.endswith("/")
        self.redirect(f"{'' if is_folder or not here else here + '/'}overview{query}")


class _Headers(OutputTransform):
    """Adds the headers to each answer."""

    def __init__(self, request: Any) -> None:
        self._is_static = "/static/" in request.path

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        for name, value in _HEADERS.items():
            if not (self._is_static and name == "Cache-Control"):
                headers[name] = value
        return status_code, headers, chunk


class _Tornado(BokehTornado):
    """The web application; its pages find their scripts under any path that a proxy adds."""

    def resources(self, absolute_url: str | bool | None = None) -> Resources:
        return Resources(mode="server", root_url="", path_versioner=None)


def serve(loop: IOLoop, listener: socket.socket, prefix: str, token: str, source: Source) -> None:
    """Serve the pages on a listening socket, once the loop runs."""
    auth = _Token(token)
    applications = {
        f"/{page.path}": Application(FunctionHandler(partial(page.build, source=source)))
        for page in PAGES
    }
    tornado = _Tornado(
        applications,
        prefix=prefix,
        auth_provider=auth,
        sign_sessions=True,
        secret_key=secrets.token_bytes(32),
        extra_websocket_origins=["*"],  # a page's signed token is needed, wherever it is
        extra_patterns=[(r"/?", _Root), (r"/login", _Login)],
        use_index=False,
        include_headers=[],
        include_cookies=[],
        session_token_expiration=3600,
    )
    tornado.add_transform(_Headers)
    http = HTTPServer(tornado, xheaders=False, max_body_size=1 << 20)
    listener.setblocking(False)
    http.add_sockets([listener])
    BaseServer(loop, tornado, http).start()


def read_records(path: Path) -> Clusters:
    """Return the runs recorded in a file, or in the files of a folder.

    Raises:
        ConfigError: if there is no record.
    """
    # Oldest first, as the clusters ran.
    files = sorted(path.glob(f"*{SUFFIX}"), key=os.path.getmtime) if path.is_dir() else [path]
    clusters = Clusters()
    for file in files:
        try:
            lines = file.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read: {error.strerror}. Give the record of a launch, or a "
                "folder of records"
            ) from error
        for number, line in enumerate(lines, 1):
            try:
                clusters.add(event_of(line))
            except msgspec.DecodeError as error:
                if number == len(lines):
                    break  # an incomplete line: the program ended while writing it
                raise ConfigError(
                    f"{file}:{number} is no event of sparkdl's: {error}. Give a file that a "
                    "launch with record= has written"
                ) from error
    if not clusters.histories:
        raise ConfigError(f"{path}: no record is there. Launch with record={str(path)!r}")
    return clusters


def show_records(path: Path, host: str, port: int) -> None:
    """Serve recorded runs until interrupted.

    Raises:
        ConfigError: if there is no record, or nothing can listen there.
    """
    source = Source(read_records(path), None)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(
            f"nothing can listen at {host}:{port}: {error.strerror}. Choose another --port, or "
            "leave it out for any free one"
        ) from error
    token, loop = secrets.token_urlsafe(24), IOLoop.current()
    serve(loop, listener, "", token, source)
    sys.stdout.write(f"http://{host_port(host, listener.getsockname()[1])}/?token={token}\n")
    sys.stdout.flush()
    loop.start()


def main() -> None:
    """Serve the events that the driver writes to standard input, until it ends."""
    logging.basicConfig(level=logging.ERROR)  # the rest is of no use to who trains
    listener = socket.socket(fileno=int(sys.argv[1]))
    clusters, loop, lock = Clusters(), IOLoop.current(), threading.Lock()
    lines = iter(sys.stdin.buffer.readline, b"")
    token = next(lines).decode().strip()

    def ask(question: Ask) -> None:
        # Whole lines, because several pages may ask at once.
        with lock:
            sys.stdout.buffer.write(line_of(question))
            sys.stdout.buffer.flush()

    def read() -> None:
        for line in lines:
            # On the loop, which alone reads and changes the clusters.
            loop.add_callback(clusters.add, event_of(line))
        # The driver has closed its end, so its program is over.
        loop.add_callback(loop.stop)

    serve(loop, listener, sys.argv[2], token, Source(clusters, ask))
    threading.Thread(target=read, name="sparkdl-events", daemon=True).start()
    loop.start()


if __name__ == "__main__":
    main()
