"""The model, collator and rows of the page's program.

Runs in: the driver of a page's program
"""


def make_model():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=8, num_hidden_layers=1, **sizes)
    return BertForSequenceClassification(config)


def collate(rows):
    import torch

    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "labels": torch.stack([row["label"] for row in rows]),
    }


tokens = spark.range(64).selectExpr(
    "array_repeat(id % 8, cast(id % 5 + 1 as int)) as input_ids", "id % 2 as label"
)
