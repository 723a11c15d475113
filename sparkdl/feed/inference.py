"""One partition of inference: its rows go to one node, and its results come back.

Runs in: feeder
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.feed.order import FeederError, FeedOrder, Target, flight_reason
from sparkdl.feed.receiver import ExchangeHeader


def exchange(
    order: FeedOrder, name: str, target: Target, batches: Iterator[pa.RecordBatch]
) -> Iterator[bytes]:
    """Send one inference partition to `target`; yield Arrow IPC streams of encoded result rows.

    Raises:
        FeederError: if the node failed or answered wrongly; the message is the node's.
    """
    first = next(batches, None)
    if first is None:
        return
    command = msgspec.json.encode(ExchangeHeader(order.feed, name, order.timeout_s))
    with flight.connect(target.uri) as client:
        try:
            writer, reader = client.do_exchange(
                flight.FlightDescriptor.for_command(command), order.options()
            )
        except (pa.ArrowException, OSError) as error:
            raise FeederError(
                f"inference at {target.name} failed: {flight_reason(error)}"
            ) from None
        problems: list[BaseException] = []

        def pump() -> None:
            try:
                writer.begin(first.schema)
                writer.write_batch(first)
                for batch in batches:
                    writer.write_batch(batch)
                writer.done_writing()
            except BaseException as error:  # noqa: BLE001 (raised by the other thread)
                problems.append(error)
                reader.cancel()

        thread = threading.Thread(target=pump, name="sparkdl-exchange", daemon=True)
        thread.start()
        try:
            for chunk in reader:
                yield chunk.data.column(0)[0].as_py()
            thread.join(order.timeout_s)
            writer.close()
        except (pa.ArrowException, OSError) as error:
            is_ours = problems and isinstance(error, flight.FlightCancelledError)
            cause = problems[0] if is_ours else error
            if not isinstance(cause, (pa.ArrowException, OSError)):
                raise cause from None
            raise FeederError(
                f"inference at {target.name} failed: {flight_reason(cause)}"
            ) from None
        finally:
            reader.cancel()  # whoever stops asking does not leave the node waiting
