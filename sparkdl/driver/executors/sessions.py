"""A common interface to classic Spark sessions and those of Spark Connect.

Runs in: driver. It loads with `pyspark-client`, which has neither py4j nor RDDs.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyspark
from pyspark import InheritableThread, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.core.jobs import context_of
from sparkdl.spark_versions import IS_SPARK_3

if TYPE_CHECKING:
    from pyspark import SparkContext

_NOWHERE = "sparkdl-asks-where-this-would-be"


def is_running(spark: SparkSession | SparkContext) -> bool:
    context = context_of(spark)
    if context is None:
        return not getattr(spark, "is_stopped", False)  # of Spark Connect alone
    return context._jsc is not None


def active_session() -> SparkSession | None:
    """Return this thread's session, or else the program's; they may differ over Spark Connect."""
    try:
        return SparkSession.active()
    except PySparkException:
        context = getattr(getattr(pyspark, "SparkContext", None), "_active_spark_context", None)
        return SparkSession(context) if context else None


def session_of(spark: SparkSession | SparkContext | None) -> SparkSession:
    """Return the session of `spark`; the active one for `None`."""
    given = spark if spark is not None else active_session()
    if given is None:
        raise ConfigError(
            "there is no active SparkSession; give one to launch, or use executor='local'"
        )
    if not is_running(given):
        raise ConfigError(
            f"the {type(given).__name__} has been stopped. Start another one with "
            "SparkSession.builder.getOrCreate(), or stop it when the cluster has been shut down"
        )
    if IS_SPARK_3 and context_of(given) is None:
        raise ConfigError("Spark Connect needs pyspark 4.0 or later; use a classic SparkSession")
    found: Any = given
    return SparkSession(found) if context_of(given) is given else found


def inheriting_thread(
    session: SparkSession | None, run: Callable[[], None], name: str
) -> threading.Thread:
    """Return a daemon thread whose jobs have the pool, group, tags and description of this one's.

    Args:
        session: whose tags the thread takes over; `None` for the active one, if there is any.
    """
    session = session or active_session()
    if session is None:
        return threading.Thread(target=run, name=name, daemon=True)
    if context_of(session) is not None:
        more = {} if IS_SPARK_3 else {"session": session}
        return InheritableThread(target=run, name=name, daemon=True, **more)
    # Why not InheritableThread? It asks how the process began, not whose session this is.
    inherit = inheritance(session)

    def tagged() -> None:
        inherit()
        run()

    return threading.Thread(target=tagged, name=name, daemon=True)


def inheritance(session: SparkSession | None) -> Callable[[], None]:
    """Return what gives a thread that calls it the pool, group, tags and description of this one.

    It is for threads that a library starts; see `inheriting_thread` for our own.
    """
    if session is None:
        return lambda: None
    any_session: Any = session
    context, tags = context_of(session), set() if IS_SPARK_3 else any_session.getTags()
    properties: Any = context and context._jsc.sc().getLocalProperties().clone()

    def inherit() -> None:
        if context is None:
            any_session._active_session.session = session  # of this thread: Spark ML asks for it
        else:
            context._jsc.sc().setLocalProperties(properties.clone())
        for tag in tags:
            any_session.addTag(tag)

    return inherit


def driver_host(session: SparkSession) -> str:
    """Return the address under which executors reach this machine, IPv6 without brackets.

    A Spark Connect client may run on another machine than the server. If `spark.driver.host` is not
    an address of this machine, return the client's address towards the server.
    """
    host = str(session.conf.get("spark.driver.host")).strip("[]")
    if context_of(session) is not None:
        return host
    # Only an address of this machine can be bound.
    with suppress(OSError), socket.create_server((host, 0)):
        return host
    client: Any = session.client
    with suppress(OSError):
        family, kind, *_, server = socket.getaddrinfo(client.host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            towards.connect(server)  # sends nothing
            return str(towards.getsockname()[0])
    return host


def is_rdd(data: Any) -> bool:
    """Whether `data` is an RDD; `pyspark-client` does not know the class."""
    return hasattr(type(data), "mapPartitionsWithIndex")


def default_fs(session: SparkSession) -> str:
    context = context_of(session)
    if context is None:
        uri = urlsplit(qualified(session, "/"))
        url = f"{uri.scheme or 'file'}://{uri.netloc}"
    else:
        url = context._jsc.hadoopConfiguration().get("fs.defaultFS")
    return "file://" if url.startswith("file:") else str(url).rstrip("/")


def qualified(session: SparkSession, path: str) -> str:
    """Return the URL that a Spark Connect server makes of a path.

    Spark Connect has no call for this, but its error for a missing file names the URL.
    """
    try:
        _ = session.read.text(f"{path.rstrip('/')}/{_NOWHERE}").schema
    except PySparkException as error:
        missing = (error.getMessageParameters() or {}).get("path", "")
        return missing.removesuffix(_NOWHERE).rstrip("/") or path
    return path


def pickle_by_value(module: Any) -> None:
    """Pickle a module by value from now on, so that executors need not have it."""
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def encrypting_setting(spark: SparkSession) -> str:
    """Return the setting by which Spark encrypts its own connections; empty if it does not.

    https://spark.apache.org/docs/latest/security.html#network-encryption
    """
    names = (
        "spark.network.crypto.enabled",
        "spark.ssl.rpc.enabled",
        "spark.ssl.enabled",
        "spark.authenticate.enableSaslEncryption",
    )
    return next((name for name in names if is_true(spark.conf.get(name, None))), "")


def is_true(value: str | None) -> bool:
    """Return whether a setting of Spark's is true."""
    return value is not None and value.lower() == "true"
