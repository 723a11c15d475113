"""Hugging Face: a Trainer on several nodes, fed from a DataFrame of texts; it survives a kill.

    spark-submit examples/huggingface/train.py

The model is a tiny, untrained BERT, and the tokens are words: nothing is downloaded.

Data: generated sentences that praise or criticize films. Prints `first-epoch accuracy` and
`last-epoch accuracy`, the last above 0.9. Takes about 35 seconds on two cores.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

import sparkdl

GOOD, BAD = ("great", "lovely", "superb", "fun"), ("dull", "poor", "awful", "bland")
OTHER = ("the", "film", "plot", "cast", "was", "a", "very", "and", "music", "story")
WORDS = ["[PAD]", *GOOD, *BAD, *OTHER]


def review(number: int) -> tuple[str, int]:
    """Return a text with one positive or negative word, and its label: 1 if positive."""
    label = number % 2
    draw = random.Random(number)
    words = [*draw.choices(OTHER, k=draw.randint(3, 9)), draw.choice(GOOD if label else BAD)]
    draw.shuffle(words)
    return " ".join(words), label


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> list[float]:
    """Train, and return the accuracy of each epoch. Runs once in every node."""
    import torch
    import transformers
    from torch.nn.utils.rnn import pad_sequence
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    from sparkdl.transformers import Checkpoint

    transformers.set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(WORDS), num_hidden_layers=1, **sizes)
    numbers = {word: number for number, word in enumerate(WORDS)}

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = [torch.tensor([numbers[word] for word in row["text"].split()]) for row in rows]
        ids = pad_sequence(tokens, batch_first=True)
        labels = torch.stack([row["label"] for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    checkpoint = Checkpoint()
    trainer = transformers.Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            output_dir=tempfile.mkdtemp(),  # sparkdl copies checkpoints to `checkpoint_dir`
            max_steps=args.epochs * args.rows // (args.batch_size * ctx.num_workers),
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=1e-2,
            save_steps=10,
            save_total_limit=1,
            eval_strategy="epoch",
            remove_unused_columns=False,
            report_to=[],
        ),
        data_collator=collate,
        train_dataset=ctx.torch_dataset(args.batch_size, shuffle=True),
        eval_dataset=ctx.torch_dataset(args.batch_size, feed="validation"),
        compute_metrics=accuracy,
        callbacks=[checkpoint],
    )
    trainer.train(resume_from_checkpoint=checkpoint.path)
    return [log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log]


def main() -> None:
    """Feed the nodes from the Spark session of spark-submit."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=32, help="per node")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl Hugging Face").getOrCreate()
    try:
        rows = [review(number) for number in range(args.rows + 256)]
        frame = spark.createDataFrame(rows[256:], "text string, label long").repartition(4)
        validation = spark.createDataFrame(rows[:256], "text string, label long")
        with (
            tempfile.TemporaryDirectory() as folder,
            sparkdl.launch(
                spark,
                train,
                args,
                args.nodes,
                framework="torch",
                max_restarts=1,
                checkpoint_dir=folder,
                observe=sparkdl.Observe(log_to_driver=True),
            ) as cluster,
        ):
            cluster.feed_async(validation, epochs=args.epochs, feed="validation")
            cluster.feed(frame, epochs=args.epochs, shuffle="global")
            found = cluster.results()[0]
        print(f"Trainer: first-epoch accuracy {found[0]:.2f}, last-epoch accuracy {found[-1]:.2f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
