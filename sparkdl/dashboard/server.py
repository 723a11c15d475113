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
import shutil
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.resources import Resources
from bokeh.server.auth_provider import AuthProvider
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders
from tornado.ioloop import IOLoop, PeriodicCallback
from tornado.web import OutputTransform, RequestHandler
from tornado.websocket import WebSocketHandler

from sparkdl.core.errors import ConfigError
from sparkdl.core.world import host_port
from sparkdl.dashboard import sentences
from sparkdl.dashboard.pages import PAGES
from sparkdl.driver.events import SUFFIX, event_of
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
_LOGIN = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>sparkdl</title>
<h1>sparkdl</h1><p>{sentences.LOGIN}</p>"""


class _Token(AuthProvider):
    get_user_async = login_url = login_handler = logout_url = logout_handler = None

    def __init__(self, token: str) -> None:
        self._token = token
        # Named by the token: a browser sends the cookies of a host to all its dashboards.
        self._cookie = f"sparkdl-{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        super().__init__()

    def is_right(self, token: str | None) -> bool:
        # In constant time, so that the time of an answer gives nothing away.
        return token is not None and hmac.compare_digest(token.encode(), self._token.encode())

    def get_user(self, handler: Any) -> str | None:
        if isinstance(handler, WebSocketHandler):
            return "page"  # Bokeh checks the signature that only a page has
        if self.is_right(handler.get_query_argument("token", None)):
            about: Any = {"httponly": True, "samesite": "Lax", "expires_days": 7}
            handler.set_cookie(self._cookie, self._token, **about)
            return "token"
        return "cookie" if self.is_right(handler.get_cookie(self._cookie)) else None

    def get_login_url(self, handler: Any) -> str:
        return "login"


class _Login(RequestHandler):
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


def serve(
    loop: IOLoop, listener: socket.socket, prefix: str, token: str, clusters: Clusters
) -> None:
    auth = _Token(token)
    applications = {
        f"/{page.path}": Application(FunctionHandler(partial(page, clusters=clusters)))
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


class Records:
    """Reads the records of runs, again and again: those of runs that go on grow."""

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters
        self._files: dict[Path, IO[bytes]] = {}

    def add(self, path: Path) -> None:
        """Read a record, or the records in a folder, from now on."""
        # Oldest first, as the clusters ran.
        files = sorted(path.glob(f"*{SUFFIX}"), key=os.path.getmtime) if path.is_dir() else [path]
        for file in files:
            try:
                self._files[file] = file.open("rb")
            except OSError as error:
                raise ConfigError(
                    f"{file} cannot be read: {error.strerror}. Give the record of a launch, or a "
                    "folder of records"
                ) from error
        self.read()

    def read(self) -> None:
        """Take in what has been written since."""
        for path, file in self._files.items():
            while (line := file.readline()).endswith(b"\n"):
                try:
                    self._clusters.add(event_of(line))
                except msgspec.DecodeError as error:
                    raise ConfigError(
                        f"{path} is not a record of sparkdl: {error}. Give a file that a launch "
                        "with Observe(record=…) has written"
                    ) from error
            file.seek(-len(line), os.SEEK_CUR)  # a line that is being written

    def follow(self) -> None:
        """Read once a second while the loop runs."""
        PeriodicCallback(self.read, 1000).start()


def show_records(path: Path, host: str, port: int) -> None:
    """Serve recorded runs until interrupted."""
    clusters = Clusters()
    records = Records(clusters)
    records.add(path)
    if not clusters.histories:
        raise ConfigError(f"{path}: no record is there. Launch with Observe(record={str(path)!r})")
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port; --port 0 "
            "takes any free one"
        ) from error
    token, loop = secrets.token_urlsafe(24), IOLoop.current()
    serve(loop, listener, "", token, clusters)
    sys.stdout.write(f"http://{host_port(host, listener.getsockname()[1])}/?token={token}\n")
    sys.stdout.flush()
    records.follow()
    loop.start()


def main() -> None:
    """Serve the records that the driver names on standard input, until it ends.

    The first lines are the token and the folder of records that end with the driver.
    """
    logging.basicConfig(level=logging.ERROR)  # the rest is of no use to who trains
    listener = socket.socket(fileno=int(sys.argv[1]))
    clusters, loop = Clusters(), IOLoop.current()
    records = Records(clusters)
    lines = iter(sys.stdin.buffer.readline, b"")
    token, folder = next(lines).decode().strip(), os.fsdecode(next(lines).rstrip(b"\n"))

    def listen() -> None:
        for line in lines:
            # On the loop, which alone reads and changes the clusters.
            loop.add_callback(records.add, Path(os.fsdecode(line.rstrip(b"\n"))))
        # The driver has closed its end, so its program is over.
        loop.add_callback(loop.stop)

    serve(loop, listener, sys.argv[2], token, clusters)
    threading.Thread(target=listen, name="sparkdl-records", daemon=True).start()
    records.follow()
    loop.start()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
