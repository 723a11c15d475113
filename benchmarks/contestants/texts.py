"""The contestants of `inference.py --model`: ways to embed sentences, and to continue them.

The model is loaded and all rows have been scored once before the clock starts. The language model
is a decoder of four layers with random weights, which stops at no end.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feeding import feed_session
from harness import NODES, arguments, claim_stdout, cpu_s, write

if TYPE_CHECKING:
    import numpy as np
    from pyspark.sql import DataFrame

WIDTH = 384
"""Numbers in the embedding of a sentence."""
NEW_TOKENS = 32
_FLOATS = "embedding array<float>"
Action = Callable[[], int]
Encode = Callable[[Any], "np.ndarray"]


def encoder(path: str) -> Encode:
    """Return the function that all contestants call: the mean of the tokens, of length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval()

    def encode(texts: Any) -> np.ndarray:
        given = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**given).last_hidden_state
            mask = given["attention_mask"][..., None]
            mean = (hidden * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(mean).numpy()

    return encode


def generator(path: str) -> tuple[Any, Any]:
    """Return a language model with the tokenizer of `path`."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": len(tokenizer)}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends)), tokenizer


OPTIONS = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
loaded = cache(encoder)


def embeddings(scored: DataFrame) -> Action:
    """Return an action that computes all embeddings and returns their numbers."""
    from pyspark.sql import functions

    return lambda: int(scored.agg(functions.sum(functions.size("embedding"))).first()[0])


def make_of(path: str) -> Callable[[dict[str, Any]], Any]:
    encode = encoder(path)
    return lambda columns: encode(columns["text"])


def by_sparkdl(data: DataFrame, args: argparse.Namespace) -> Action:
    from sparkdl import predict

    options = {"group_by_length": "text"} if args.way == "grouped" else {}
    make = partial(make_of, args.model)
    return embeddings(predict(data, make, ["text"], _FLOATS, batch_size=args.batch, **options))


def by_batch_udf(data: DataFrame, args: argparse.Namespace) -> Action:
    from pyspark.ml.functions import predict_batch_udf

    udf = predict_batch_udf(
        partial(encoder, args.model), return_type="array<float>", batch_size=args.batch
    )
    return embeddings(data.withColumn("embedding", udf("text")))


def by_pandas_udf(data: DataFrame, args: argparse.Namespace) -> Action:
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    data.sparkSession.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(args.batch))
    path = args.model

    def embed(texts: pd.Series) -> pd.Series:
        import texts as module  # the worker's, whose model stays loaded

        return pd.Series(list(module.loaded(path)(texts)))

    udf = pandas_udf(embed, "array<float>")  # type: ignore[call-overload]
    return embeddings(data.withColumn("embedding", udf("text")))


def by_engine(data: DataFrame, args: argparse.Namespace) -> Action:
    from pyspark.sql import functions

    from sparkdl import TransformersEngine, predict

    engine = TransformersEngine(partial(generator, args.model), OPTIONS)
    made = predict(data, engine, ["text"], "text string, tokens int", batch_size=args.batch,
                   keep=False)  # fmt: skip
    return lambda: int(made.agg(functions.sum("tokens"), functions.max("text")).first()[0])


@contextmanager
def limit(args: argparse.Namespace) -> Iterator[Action]:
    """Yield the action of one process that reads the files and scores, on all cores."""
    import pyarrow.dataset as ds
    import torch

    torch.set_num_threads(NODES)
    files = sorted(map(str, Path(args.path).glob("*.parquet")))
    encode = encoder(args.model)
    model, tokenizer = generator(args.model)
    model.eval()
    tokenizer.padding_side = "left"

    def embed(texts: list[str]) -> int:
        return int(encode(texts).size)

    def generate(texts: list[str]) -> int:
        given = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            found = model.generate(**given, **OPTIONS)[:, given["input_ids"].shape[1] :]
        tokenizer.batch_decode(found, skip_special_tokens=True)
        return int(found.numel())

    act = generate if args.generates else embed

    def action() -> int:
        batches = ds.dataset(files).to_batches(columns=["text"], batch_size=args.batch)
        return sum(act(batch.column("text").to_pylist()) for batch in batches)

    yield action


@contextmanager
def on_spark(args: argparse.Namespace) -> Iterator[Action]:
    """Yield an action of Spark on two executors of one slot."""
    with feed_session(slots=1, partitions=args.files) as spark:
        spark.conf.set("spark.sql.files.maxPartitionBytes", "8g")
        # The least that Spark gives a file: else it puts all of these small ones into one task.
        spark.conf.set("spark.sql.files.openCostInBytes", "8g")
        yield WAYS[args.way](spark.read.parquet(args.path), args)


WAYS = {
    **{"sparkdl": by_sparkdl, "grouped": by_sparkdl, "engine": by_engine},
    **{"batch_udf": by_batch_udf, "pandas_udf": by_pandas_udf},
}


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # on all: forked workers warn otherwise
    args = arguments()
    lines = claim_stdout()
    each = NEW_TOKENS if args.generates else WIDTH
    with limit(args) if args.way == "limit" else on_spark(args) as action:
        for number in range(args.passes + 1):
            start, used_s = time.monotonic(), cpu_s()
            if (made := action()) != args.rows * each:
                raise ValueError(f"{made} numbers or tokens, and not {each} for each row")
            took_s = time.monotonic() - start
            if number:
                cost = (cpu_s() - used_s) / args.rows * 1e3
                write(lines, "pass", **{"rows/s": args.rows / took_s, "CPU ms per row": cost})


if __name__ == "__main__":
    main()
