"""A double of Kubernetes: its API server, as far as Spark asks it, and pods that are processes.

Runs in: the process of pytest

A pod has a loopback address of its own, and runs what the entry point of Spark's images runs for an
executor or a driver, with this machine's Spark and Python. So Spark's own scheduler for Kubernetes
does what it does on a cluster: it creates pods, watches them, and replaces those that fail.

https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pyspark

from tests.doubles.until import until

NAMESPACE = "default"
API_HOST = "127.0.0.1"
_ENDED_S = 20.0
_KINDS = {
    "pods": "Pod",
    "services": "Service",
    "configmaps": "ConfigMap",
    "persistentvolumeclaims": "PersistentVolumeClaim",
}
_CONF = "/opt/spark/conf"
_SERVICE = re.compile(rf"[\w-]+\.{NAMESPACE}\.svc")
_THEN = "2026-01-01T00:00:00Z"

Object = dict[str, Any]


@dataclass
class _Store:
    """The objects by kind and name, and what has happened to them: a watch is a place in that."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    events: list[tuple[str, str, Object]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_closed: bool = False

    def put(self, kind: str, what: Object) -> Object:
        """Create or replace an object."""
        with self.changed:
            name = what["metadata"]["name"]
            type_ = "MODIFIED" if (kind, name) in self.objects else "ADDED"
            self._note(type_, kind, what)
            self.objects[kind, name] = what
            return what

    def remove(self, kind: str, name: str) -> Object | None:
        with self.changed:
            found = self.objects.pop((kind, name), None)
            if found is not None:
                self._note("DELETED", kind, found)
            return found

    def list(self, kind: str, selector: str) -> list[Object]:
        with self.changed:
            of_kind = [each for (of, _), each in self.objects.items() if of == kind]
        return [each for each in of_kind if _matches(each, selector)]

    def follow(self, kind: str, selector: str, since: int) -> Iterator[Object]:
        """Yield what happens after `since`, a resource version, until the store is closed."""
        while True:
            with self.changed:
                while not self.is_closed and len(self.events) <= since:
                    self.changed.wait()
                if self.is_closed:
                    return
                new, since = self.events[since:], len(self.events)
            for type_, of, what in new:
                if of == kind and _matches(what, selector):
                    yield {"type": type_, "object": what}

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def _note(self, type_: str, kind: str, what: Object) -> None:
        what["metadata"]["resourceVersion"] = str(len(self.events) + 1)
        self.events.append((type_, kind, json.loads(json.dumps(what))))
        self.changed.notify_all()


class Kubernetes:
    """The cluster. `url` is its API server's.

    Args:
        folder: for the pods' files, and their logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = _Store()
        self._pods: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._count = 0
        self._server = ThreadingHTTPServer((API_HOST, 0), partial(_Api, self))
        self._server.daemon_threads = False
        self._serving = threading.Thread(target=self._server.serve_forever, name="kubernetes")
        self._serving.start()

    @property
    def url(self) -> str:
        return f"http://{API_HOST}:{self._server.server_address[1]}"

    def pods(self, role: str = "executor") -> dict[str, Object]:
        """Return the pods that run, by name."""
        found = self.store.list("pods", f"spark-role={role}")
        return {p["metadata"]["name"]: p for p in found if p["status"]["phase"] == "Running"}

    def log(self, pod: str) -> str:
        return (self.folder / pod / "log").read_text(errors="replace")

    def kill(self, pod: str) -> None:
        """Kill a pod's processes, as a node does that runs out of memory."""
        for process in _family(self._pods[pod].pid):
            process.kill()

    def warn(self, pod: str) -> None:
        """Give a pod notice of its end, as the preStop hook of Spark's images does."""
        self._pods[pod].send_signal(signal.SIGPWR)

    def close(self) -> None:
        self.store.close()
        for process in [each for pod in self._pods.values() for each in _family(pod.pid)]:
            process.kill()
        for thread in self._threads:
            thread.join(_ENDED_S)
        self._server.shutdown()
        self._serving.join(_ENDED_S)
        self._server.server_close()

    def created(self, kind: str, what: Object) -> Object:
        """Store a new object; start the processes of a pod once it is there."""
        what["metadata"].setdefault("uid", f"uid-{what['metadata']['name']}")
        what["metadata"].setdefault("creationTimestamp", _THEN)
        if kind != "pods":
            return self.store.put(kind, what)
        what["status"] = {"phase": "Pending", "conditions": [], "containerStatuses": []}
        stored = self.store.put(kind, what)
        thread = threading.Thread(target=self._run, args=(what,), name=what["metadata"]["name"])
        with self._lock:
            self._threads.append(thread)
        thread.start()
        return stored

    def deleted(self, kind: str, name: str) -> Object | None:
        found = self.store.remove(kind, name)
        if kind == "pods" and (process := self._pods.get(name)) is not None:
            process.terminate()
        return found

    def _run(self, pod: Object) -> None:
        """Be the node's kubelet for one pod."""
        with self._lock:
            self._count += 1
            address = f"127.0.1.{self._count}"
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        home = self.folder / name
        (home / "conf").mkdir(parents=True)
        self._mount(pod, home / "conf", address)
        environment = os.environ | self._environment(pod, container, home, address)
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                _command(container, environment, home),
                env=environment,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._pods[name] = process
        if self.store.is_closed or ("pods", name) not in self.store.objects:
            process.kill()  # deleted meanwhile
        self._report(pod, "Running", address, {"running": {"startedAt": _THEN}})
        status = process.wait()
        ended = {"terminated": {"exitCode": status if status >= 0 else 128 - status}}
        self._report(pod, "Failed" if status else "Succeeded", address, ended)

    def _report(self, pod: Object, phase: str, address: str, state: Object) -> None:
        stored = self.store.objects.get(("pods", pod["metadata"]["name"]))
        if stored is None:
            return  # deleted
        container = pod["spec"]["containers"][0]["name"]
        status = {"name": container, "state": state, "ready": phase == "Running", "restartCount": 0}
        ready = {"type": "Ready", "status": str(phase == "Running")}
        about: Object = {"phase": phase, "podIP": address, "hostIP": API_HOST, "startTime": _THEN}
        about |= {"containerStatuses": [status], "conditions": [ready]}
        self.store.put("pods", {**stored, "status": about})

    def _mount(self, pod: Object, conf: Path, address: str) -> None:
        """Write the files of its config maps; the driver's service, which DNS would know, is it."""
        names = _config_maps(pod)
        assert until(lambda: all(("configmaps", name) in self.store.objects for name in names))
        for name in names:
            for file, text in self.store.objects["configmaps", name]["data"].items():
                (conf / file).write_text(_SERVICE.sub(address, text))

    def _environment(
        self, pod: Object, container: Object, home: Path, address: str
    ) -> dict[str, str]:
        fields = {"status.podIP": address, "metadata.name": pod["metadata"]["name"]}
        found = {}
        for each in container.get("env", ()):
            source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[each["name"]] = fields[source] if source else each.get("value", "")
        return found | {
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_CONF_DIR": str(home / "conf"),
            "SPARK_LOCAL_DIRS": str(home),
            "SPARK_LOCAL_IP": address,
            "SPARKDL_NODE_HOST": address,
            "SPARKDL_DRIVER_HOST": address,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }


def _command(container: Object, environment: Mapping[str, str], home: Path) -> list[str]:
    """Return what `entrypoint.sh` of Spark's images runs."""
    role, *arguments = container["args"]
    spark = Path(environment["SPARK_HOME"])
    if role == "driver":
        words = [word.replace(_CONF, str(home / "conf")) for word in arguments]
        bind = f"spark.driver.bindAddress={environment['SPARK_LOCAL_IP']}"
        submit = str(spark / "bin" / "spark-submit")
        return [submit, "--conf", bind, "--deploy-mode", "client", *words]
    java = Path(environment["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in environment else "java"
    options = [value for name, value in environment.items() if name.startswith("SPARK_JAVA_OPT_")]
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    return [
        *(str(java), *options, f"-Xmx{memory}", "-cp", f"{home}/conf:{spark}/jars/*"),
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        *("--driver-url", environment["SPARK_DRIVER_URL"]),
        *("--executor-id", environment["SPARK_EXECUTOR_ID"]),
        *("--cores", environment["SPARK_EXECUTOR_CORES"]),
        *("--app-id", environment["SPARK_APPLICATION_ID"]),
        *("--hostname", environment["SPARK_EXECUTOR_POD_IP"]),
        *("--resourceProfileId", environment["SPARK_RESOURCE_PROFILE_ID"]),
        *("--podName", environment["SPARK_EXECUTOR_POD_NAME"]),
    ]


def _config_maps(pod: Object) -> list[str]:
    volumes = pod["spec"].get("volumes", ())
    return [each["configMap"]["name"] for each in volumes if "configMap" in each]


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _matches(what: Object, selector: str) -> bool:
    """Whether an object has such labels: `a=b,c!=d,e,!f`."""
    about = what["metadata"]
    labels = {**about.get("labels", {}), "metadata.name": about["name"]}
    for term in filter(None, selector.split(",")):
        name, is_pair, value = term.partition("=")
        if name.endswith("!"):
            if labels.get(name[:-1]) == value:
                return False
        elif term.startswith("!"):
            if term[1:] in labels:
                return False
        elif labels.get(name) != value if is_pair else name not in labels:
            return False
    return True


class _Api(BaseHTTPRequestHandler):
    """One connection to the API server."""

    protocol_version = "HTTP/1.1"

    def __init__(self, cluster: Kubernetes, *connection: Any) -> None:
        self._cluster = cluster
        super().__init__(*connection)

    def log_message(self, format: str, *arguments: Any) -> None:
        with (self._cluster.folder / "api.log").open("a") as log:
            log.write(f"{format % arguments}\n")

    def do_GET(self) -> None:
        kind, name, query = self._target()
        store, field = self._cluster.store, query.get("fieldSelector", "")  # metadata.name=…
        selector = ",".join(filter(None, (query.get("labelSelector", ""), field)))
        if self.headers.get("Upgrade"):  # a WebSocket: upon this the client watches by plain HTTP
            self._answer(503, _status(503, "no WebSockets here"))
        elif query.get("watch") == "true":
            self._stream(store.follow(kind, selector, int(query.get("resourceVersion") or 0)))
        elif name:
            found = store.objects.get((kind, name))
            self._answer(200, found) if found else self._missing(name)
        else:
            items, version = store.list(kind, selector), str(len(store.events))
            listed = {"kind": f"{_KINDS[kind]}List", "apiVersion": "v1", "items": items}
            self._answer(200, {**listed, "metadata": {"resourceVersion": version}})

    def do_POST(self) -> None:
        kind, _, _ = self._target()
        self._answer(201, self._cluster.created(kind, self._body()))

    def do_PUT(self) -> None:
        kind, name, _ = self._target()
        self._apply(kind, name, self._body())

    def do_PATCH(self) -> None:
        kind, name, _ = self._target()
        self._apply(kind, name, self._body())

    def do_DELETE(self) -> None:
        kind, name, query = self._target()
        self._body()
        if name:
            found = self._cluster.deleted(kind, name)
            self._answer(200, found) if found else self._missing(name)
            return
        for each in self._cluster.store.list(kind, query.get("labelSelector", "")):
            self._cluster.deleted(kind, each["metadata"]["name"])
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _apply(self, kind: str, name: str, change: Any) -> None:
        """Create the object or merge the change into it: what server-side apply comes to here."""
        stored = self._cluster.store.objects.get((kind, name))
        if isinstance(change, list):  # a JSON patch
            change = _merge_patch(change)
        if stored is None:
            self._answer(201, self._cluster.created(kind, change))
        else:
            self._answer(200, self._cluster.store.put(kind, _merged(stored, change)))

    def _target(self) -> tuple[str, str, dict[str, str]]:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        kind, name, *_ = [*parts[4:], "", ""]  # api/v1/namespaces/NAMESPACE/KIND/NAME
        return kind, name, query

    def _body(self) -> Any:
        nbytes = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(nbytes)) if nbytes else {}

    def _answer(self, code: int, what: Object) -> None:
        data = json.dumps(what).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _missing(self, name: str) -> None:
        self._answer(404, _status(404, f"{name} not found"))

    def _stream(self, events: Iterator[Object]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for event in events:
                self.wfile.write(json.dumps(event).encode() + b"\n")
                self.wfile.flush()
        except OSError:
            return


def _status(code: int, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "message": message,
    }


def _merged(before: Any, change: Any) -> Any:
    if not (isinstance(before, dict) and isinstance(change, dict)):
        return change
    return {**before, **{name: _merged(before.get(name), value) for name, value in change.items()}}


def _merge_patch(changes: list[Object]) -> Object:
    found: Object = {}
    for change in changes:
        *way, last = change["path"].strip("/").split("/")
        at = found
        for name in way:
            at = at.setdefault(name, {})
        at[last.replace("~1", "/").replace("~0", "~")] = change.get("value")
    return found


@contextmanager
def kubernetes(folder: Path) -> Iterator[Kubernetes]:
    """Have a cluster; all its pods end with it."""
    cluster = Kubernetes(folder)
    try:
        yield cluster
    finally:
        cluster.close()
