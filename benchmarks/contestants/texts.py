"""The contestant of `inference.py --model`: ways to embed sentences, or to continue them, in turn.

All ways run in one Spark application, pass after pass, so that noise affects all alike. Before the
clock starts, the JVMs have compiled the code of such jobs, the models are loaded and all rows have
been scored once. The language model is a decoder of four layers with random weights, which stops at
no end.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd  # pandas_udf looks for it in the module
from feeding import feed_session
from harness import NODES, arguments, claim_stdout, cpu_s, write

if TYPE_CHECKING:
    import numpy as np
    from pyspark.sql import DataFrame

WIDTH = 384
"""Numbers in the embedding of a sentence."""
NEW_TOKENS = 16
WARM_JOBS = 8
"""Jobs before the clock starts: of equal ones, the first took 3.3 s, the eighth 0.7 s."""
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


def empty(texts: pd.Series) -> pd.Series:
    return pd.Series([[0.0]] * len(texts))


def make_of(path: str) -> Callable[[dict[str, Any]], Any]:
    encode = encoder(path)
    return lambda columns: encode(columns["text"])


def by_sparkdl(data: DataFrame, args: argparse.Namespace) -> Action:
    from sparkdl import predict

    make = partial(make_of, args.model)
    return embeddings(predict(data, make, ["text"], _FLOATS, batch_size=args.batch))


def by_length(data: DataFrame, args: argparse.Namespace) -> Action:
    from sparkdl import predict

    given = {"batch_size": args.batch, "group_by_length": "text"}
    return embeddings(predict(data, partial(make_of, args.model), ["text"], _FLOATS, **given))


def by_batch_udf(data: DataFrame, args: argparse.Namespace) -> Action:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    floats, make = ArrayType(FloatType()), partial(encoder, args.model)
    udf = predict_batch_udf(make, return_type=floats, batch_size=args.batch)
    return embeddings(data.withColumn("embedding", udf("text")))


def by_pandas_udf(data: DataFrame, args: argparse.Namespace) -> Action:
    from pyspark.sql.functions import pandas_udf

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


def embed_alone(args: argparse.Namespace) -> Callable[[list[str]], int]:
    encode = encoder(args.model)
    return lambda texts: int(encode(texts).size)


def generate_alone(args: argparse.Namespace) -> Callable[[list[str]], int]:
    import torch

    model, tokenizer = generator(args.model)
    model.eval()
    tokenizer.padding_side = "left"

    def generate(texts: list[str]) -> int:
        given = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            found = model.generate(**given, **OPTIONS)[:, given["input_ids"].shape[1] :]
        tokenizer.batch_decode(found, skip_special_tokens=True)
        return int(found.numel())

    return generate


def limit(args: argparse.Namespace, threads: ThreadPoolExecutor) -> Action:
    """Return the action of one process, the driver's: a batch in each of its threads."""
    import pyarrow.dataset as ds

    files = sorted(map(str, Path(args.path).glob("*.parquet")))
    act = (generate_alone if args.generates else embed_alone)(args)

    def action() -> int:
        batches = ds.dataset(files).to_batches(columns=["text"], batch_size=args.batch)
        return sum(threads.map(act, (each.column("text").to_pylist() for each in batches)))

    return action


EMBEDDING = {
    "sparkdl predict": by_sparkdl,
    "sparkdl predict, group_by_length": by_length,
    "predict_batch_udf": by_batch_udf,
    "pandas_udf": by_pandas_udf,
}
GENERATING = {"sparkdl TransformersEngine": by_engine}


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # in each thread of the limit, as in a task of Spark
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as it is in Spark's forked workers
    args = arguments()
    lines = claim_stdout()
    from pyspark.sql.functions import pandas_udf

    each = NEW_TOKENS if args.generates else WIDTH
    with feed_session(1, args.files) as spark, ThreadPoolExecutor(NODES) as threads:
        spark.conf.set("spark.sql.files.maxPartitionBytes", "8g")
        # The least that Spark gives a file: else it puts all of these small ones into one task.
        spark.conf.set("spark.sql.files.openCostInBytes", "8g")
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(args.batch))
        # A task costs Spark 0.1 s, however few rows it has: two tasks for each slot.
        data = spark.read.parquet(args.path).coalesce(2 * NODES)
        nothing = pandas_udf(empty, "array<float>")  # type: ignore[call-overload]
        for _ in range(WARM_JOBS):
            embeddings(data.withColumn("embedding", nothing("text")))()
        ways = {"limit: one process": limit(args, threads)}
        for name, make in (GENERATING if args.generates else EMBEDDING).items():
            ways[name] = make(data, args)
        for number in range(args.passes + 1):
            for name, action in ways.items():
                start, used_s = time.monotonic(), cpu_s()
                if (made := action()) != args.rows * each:
                    raise ValueError(f"{made} numbers or tokens, and not {each} for each row")
                took_s = time.monotonic() - start
                if number:
                    cost = (cpu_s() - used_s) / args.rows * 1e3
                    write(lines, name, **{"rows/s": args.rows / took_s, "CPU ms per row": cost})


if __name__ == "__main__":
    main()
