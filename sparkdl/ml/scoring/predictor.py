"""A loaded model, whichever framework runs it, or a function of the user's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import Any

import cloudpickle
import pyarrow as pa

from sparkdl.core.errors import InferenceError, in_words
from sparkdl.core.imports import advice_on_missing
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.engines import is_engine
from sparkdl.ml.scoring.share import Share, take_share
from sparkdl.ml.scoring.source import ModelSource, Signature
from sparkdl.values.ndarrays import Array


class RowsFailedError(InferenceError):
    """The model failed on a batch."""


class Predictor:
    """A loaded model.

    Args:
        run: maps the inputs to all outputs, by name, as the framework's tensors.
        to_values: converts one output to a numpy array.
    """

    def __init__(
        self,
        signature: Signature,
        run: Callable[[Mapping[str, Array]], Any],
        to_values: Callable[[Any], Any],
    ) -> None:
        self.signature = signature
        self._run = run
        self._to_values = to_values

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Return all outputs for some rows; by name, text as objects."""
        return {name: self._to_values(each) for name, each in self._run(inputs).items()}

    def columns(
        self, values: Mapping[str, Array], outputs: Sequence[OutputColumn]
    ) -> list[pa.Array]:
        try:
            return self._columns(self._run(values), values, outputs)
        # A function of the user's may exit, which would end the worker without a reason.
        except (Exception, SystemExit) as error:
            raise RowsFailedError(in_words(error)) from error

    def _columns(
        self,
        result: Mapping[str, Any],
        values: Mapping[str, Array],
        outputs: Sequence[OutputColumn],
    ) -> list[pa.Array]:
        rows = next(iter(values.values())).shape[0]
        names = [output.tensor for output in outputs]
        if unknown := [name for name in names if name not in result]:
            raise InferenceError(
                f"the model gave no output {', '.join(map(repr, unknown))}, but "
                f"{', '.join(map(repr, result))}"
            )
        # Only the wanted outputs: each costs a copy from the device.
        found = {name: self._to_values(result[name]) for name in names}
        for name, each in found.items():
            shape = list(each.shape) if hasattr(each, "shape") else [len(each)]
            if shape[:1] != [rows]:
                raise InferenceError(
                    f"the model's output {name!r} has shape {shape} for {rows} rows; it must "
                    "have one value for each row"
                )
        return [output.column(found[output.tensor]) for output in outputs]


Call = concurrent.futures.Future[list[pa.Array] | RowsFailedError]


class AsyncPredictor(Predictor):
    """An `async` function, by `start` in a thread's event loop; `run` is a coroutine function.

    The thread ends once nothing refers to the predictor, or with the process.
    """

    def __init__(self, run: Callable[[Mapping[str, Array]], Any]) -> None:
        super().__init__(Signature((), ()), run, lambda values: values)
        self._loop = asyncio.new_event_loop()
        end = self._loop.create_future()
        threading.Thread(target=_serve, args=(end,), name="sparkdl-async", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, end.set_result, None)

    def start(self, values: Mapping[str, Array], outputs: Sequence[OutputColumn]) -> Call:
        """Start a call, which `answer_of` waits for, or `cancel` ends."""
        return asyncio.run_coroutine_threadsafe(self._answer(values, outputs), self._loop)

    async def _answer(
        self, values: Mapping[str, Array], outputs: Sequence[OutputColumn]
    ) -> list[pa.Array] | RowsFailedError:
        try:
            return self._columns(await self._run(values), values, outputs)
        # Returned: asyncio logs an error that a cancelled call raises, and an exit ends a loop.
        except BaseException as error:  # noqa: BLE001
            failed = RowsFailedError(in_words(error))
            failed.__cause__ = error
            return failed


def answer_of(call: Call) -> list[pa.Array]:
    try:
        found = call.result()
    except concurrent.futures.CancelledError as error:  # before it began
        raise RowsFailedError(in_words(error)) from error
    if isinstance(found, RowsFailedError):
        raise found
    return found


def _serve(end: asyncio.Future[None]) -> None:
    asyncio.set_event_loop(loop := end.get_loop())
    while not (end.done() or loop.is_closed()):
        # A task of the function's may stop the loop, or exit: those who await it learn of that.
        with suppress(BaseException):
            loop.run_until_complete(end)
    loop.close()


def load_function(source: ModelSource, share: Share | None) -> Predictor:
    """Call `make`, and return the predictor that calls its result with columns."""
    if share is not None:
        take_share(share)
    assert source.content is not None
    try:
        make, names = cloudpickle.loads(source.content)
        if has_engine := is_engine(make):
            make.open()
        fn = make.generate if has_engine else make()
    except ModuleNotFoundError as error:
        raise InferenceError(f"{error}. {advice_on_missing(error)}") from error
    if not callable(fn):
        raise InferenceError(
            f"the function that makes the model returned a {type(fn).__name__}, not a function of "
            "columns"
        )

    async def run(columns: Mapping[str, Array]) -> dict[str, Any]:
        return _named(await fn(dict(columns)), names)

    found: Predictor
    if iscoroutinefunction(fn) or iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
        found = AsyncPredictor(run)
    else:
        found = Predictor(
            Signature((), ()), lambda columns: _named(fn(dict(columns)), names), lambda it: it
        )
    if has_engine:
        weakref.finalize(found, make.close)
    return found


def _named(found: Any, names: Sequence[str]) -> dict[str, Any]:
    if isawaitable(found):
        if iscoroutine(found):
            found.close()
        raise InferenceError(
            f"the function returned a {type(found).__name__} to await: define it by `async def`"
        )
    if hasattr(found, "keys"):  # a dict, a DataFrame of pandas
        return {str(name): found[name] for name in found.keys()}  # noqa: SIM118
    if len(names) == 1:
        return {names[0]: found}
    raise InferenceError(
        f"the function returned a {type(found).__name__}, and schema= declares several "
        f"columns: return a dict of {', '.join(names)}"
    )
