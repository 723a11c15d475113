"""Hugging Face's Trainer on the feed: each row once an epoch, also where a node was killed."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError, RemovedModuleError
from sparkdl.core.options import Startup
from tests.doubles.lazy import needs
from tests.doubles.map_funs import hold_checkpoint
from tests.doubles.nodes import launch
from tests.ml.text_models import TEXTS, gpt2

if TYPE_CHECKING:
    from sparkdl import NodeContext

pytestmark = [pytest.mark.torch, needs("transformers")]
_SOON_S = 200.0
ROWS = 96


def rows(count: int = ROWS) -> pa.Table:
    """Sequences of one to five tokens, which a collator pads."""
    lengths = np.arange(count) % 5 + 1
    tokens = [[int(i)] * int(n) for i, n in enumerate(lengths)]
    return pa.table({"id": np.arange(count), "input_ids": tokens, "label": np.arange(count) % 2})


def arguments(folder: str, batch: int, kind: Any = None, **given: Any) -> Any:
    make: Any = kind or import_module("transformers").TrainingArguments
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    quiet = {"report_to": [], "disable_tqdm": True}
    return make(output_dir=folder, max_steps=1000, **sizes, **quiet, **given)


def train(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    """Train a tiny classifier, whose buffer counts the rows that all nodes have trained on."""
    import torch
    from torch import distributed, nn

    from sparkdl.transformers import Checkpoint

    transformers: Any = import_module("transformers")
    torch.manual_seed(0)

    class Model(nn.Module):  # type: ignore[misc] # imported late
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(ROWS, 4), nn.Linear(4, 2)
            self.seen: Any
            self.register_buffer("seen", torch.zeros(ROWS))

        def forward(self, id: Any, input_ids: Any, mask: Any, labels: Any = None) -> Any:
            if self.training:
                counts = torch.bincount(id, minlength=ROWS).float()
                if ctx.num_workers > 1:
                    distributed.all_reduce(counts)
                self.seen += counts
            mean = (self.tokens(input_ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            logits = self.head(mean)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def collate(given: list[dict[str, Any]]) -> dict[str, Any]:
        pad = nn.utils.rnn.pad_sequence
        return {
            "id": torch.as_tensor([int(row["id"]) for row in given]),
            "input_ids": pad([torch.as_tensor(r["input_ids"]) for r in given], batch_first=True),
            "mask": pad([torch.ones(len(row["input_ids"])) for row in given], batch_first=True),
            "labels": torch.as_tensor([int(row["label"]) for row in given]),
        }

    class Dies(transformers.TrainerCallback):  # type: ignore[misc] # imported late
        def on_step_end(self, _args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            is_last = ctx.rank == ctx.num_workers - 1
            if ctx.generation == 0 and is_last and state.global_step == args.get("dies_at"):
                os.kill(os.getpid(), signal.SIGKILL)

    if args.get("held"):
        hold_checkpoint(ctx, args["held"])
    model = Model()
    checkpoint = Checkpoint() if args.get("saves") else None
    evaluated = ctx.torch_dataset(4, feed="validation") if args.get("evaluates") else None
    strategies = {"save_strategy": args.get("saves") or "no", "save_steps": 2}
    strategies |= {"eval_strategy": "epoch" if evaluated else "no", "logging_strategy": "no"}
    strategies |= {"gradient_accumulation_steps": args.get("accumulates", 1)}
    strategies |= {"remove_unused_columns": False, "ddp_broadcast_buffers": False}
    trainer = transformers.Trainer(
        model,
        arguments(args["folder"], 4, **strategies),  # the folder is of both nodes
        data_collator=collate,
        train_dataset=source(args, ctx),
        eval_dataset=evaluated,
        callbacks=[Dies(), *([checkpoint] if checkpoint else [])],
    )
    resumed = ctx.last_checkpoint
    result = trainer.train(resume_from_checkpoint=checkpoint.path if checkpoint else None)
    assert ctx._checkpoints._in_flight is None, "the end of train waits for the last"
    return {
        **{
            "seen": model.seen.tolist(),
            "steps": result.global_step,
            "eval_losses": losses(trainer),
        },
        **{"resumed_at": resumed.step if resumed else None},
        "weight": model.head.weight.detach().numpy(),
    }


def losses(trainer: Any) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def source(args: dict[str, Any], ctx: NodeContext) -> Any:
    """Return the rows as PyTorch's dataset, or Hugging Face's that is mapped by rows or batches."""
    if "batched" not in args:
        return ctx.torch_dataset(4)
    data = ctx.hf_dataset(4)
    assert list(next(iter(data))) == data.column_names == ["id", "input_ids", "label"]
    data = data.map(lambda row: {"name": row["id"]}, remove_columns="id")
    return data.map(lambda some: {"id": some["name"]}, batched=args["batched"], batch_size=7)


@pytest.mark.deep
def test_trainer_takes_a_feed_as_it_stands_each_row_once_an_epoch(tmp_path: Path) -> None:
    args = {"evaluates": True, "folder": str(tmp_path)}
    with launch(train, args, framework="torch") as cluster:
        feeding = cluster.feed_async(rows(16), epochs=2, feed="validation")
        cluster.feed(rows(), epochs=2, shuffle="global")
        results = cluster.results(_SOON_S)
        feeding.result(_SOON_S)
    for result in results:
        assert result["seen"] == [2.0] * ROWS
        assert result["steps"] == 2 * ROWS // 8
        assert len(result["eval_losses"]) == 2
    np.testing.assert_array_equal(results[0]["weight"], results[1]["weight"])
    assert results[0]["eval_losses"] == results[1]["eval_losses"]


@pytest.mark.parametrize(
    ("mapped", "nodes", "resumed_at"),
    [
        pytest.param({"saves": "steps"}, 1, 10, id="torch", marks=pytest.mark.smoke),
        # The rows read ahead are no batches of the Trainer's: it saves at the end of epochs alone.
        pytest.param(
            {"saves": "epoch", "batched": True}, 2, 6, id="packed", marks=pytest.mark.deep
        ),
    ],
)
def test_training_resumes_with_the_rows_that_its_checkpoint_does_not_cover(
    tmp_path: Path, mapped: dict[str, Any], nodes: int, resumed_at: int
) -> None:
    """It takes two steps while the checkpoint of step 12 is held up, and dies."""
    folder = str(tmp_path / "trainer")
    args = {"held": 12, "dies_at": 14, **mapped, "accumulates": 2, "folder": folder}
    options: dict[str, Any] = {"max_restarts": 1, "checkpoint_dir": str(tmp_path / "checkpoints")}
    options["startup"] = Startup(preload=["transformers.trainer"])  # once, for both generations
    with launch(train, args, nodes, framework="torch", **options) as cluster:
        cluster.feed(rows(ROWS // 2 * nodes), epochs=3, shuffle="global")
        results = cluster.results(_SOON_S)
    for result in results:
        assert result["resumed_at"] == resumed_at
        assert result["seen"][: ROWS // 2 * nodes] == [3.0] * (ROWS // 2 * nodes)
        assert result["steps"] == 3 * ROWS // 16


def tune(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    """Train on a feed of texts by TRL, evaluate on another."""
    from sparkdl.transformers import Checkpoint

    library: Any = import_module("trl")
    model, own = gpt2()
    lora: Any = import_module("peft").LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    checkpoint = Checkpoint()

    def die(*_: Any, **of: Any) -> None:
        if ctx.rank + 1 == ctx.num_workers and not ctx.generation and of["state"].epoch >= 1:
            os.kill(os.getpid(), signal.SIGKILL)

    kills: Any = type("Kills", (import_module("transformers").TrainerCallback,), {})()
    kills.on_step_begin = die
    given = {"eval_strategy": "epoch", "save_strategy": "epoch", "learning_rate": 0.01}
    given |= {"bf16": False, "max_length": 8, "lr_scheduler_type": "constant"}
    trainer = library.SFTTrainer(
        model,
        arguments(args["folder"], 2, library.SFTConfig, **given, **args["given"]),
        processing_class=own,
        train_dataset=ctx.hf_dataset(2),
        eval_dataset=ctx.hf_dataset(2, feed="validation"),
        callbacks=[checkpoint, *([kills] if args["dies"] else [])],
        peft_config=lora if args["dies"] else None,
    )
    trainer.train(resume_from_checkpoint=checkpoint.path)
    steps = trainer.state.global_step
    return {"losses": losses(trainer), "steps": steps, "restarts": ctx.generation}


@needs("trl")
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("given", "dies"),
    [
        ({"packing": False}, True),
        ({"packing": True, "eval_packing": False, "shuffle_dataset": True}, False),
    ],
)
def test_sft_trainer_tunes_on_a_feed_of_texts_and_evaluates(
    tmp_path: Path, given: Any, dies: bool
) -> None:
    texts = pa.table({"text": TEXTS * 8})
    args = {"folder": str(tmp_path / "trainer"), "given": given, "dies": dies}
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "max_restarts": 1}
    options["startup"] = Startup(preload=["trl.trainer.sft_trainer"])
    with launch(tune, args, framework="torch", **options) as cluster:
        feeding = cluster.feed_async(texts.slice(0, 24), epochs=3, feed="validation")
        cluster.feed(texts, epochs=3)
        results = cluster.results(_SOON_S)
        feeding.result(_SOON_S)
    assert results[0] == results[1]
    assert len(results[0]["losses"]) == 3
    assert results[0]["losses"][-1] < results[0]["losses"][0]
    assert results[0]["restarts"] == dies
    assert results[0]["steps"] == 36 or given["packing"]


def test_checkpoint_outside_of_a_node_is_an_error() -> None:
    from sparkdl.transformers import Checkpoint

    with pytest.raises(ConfigError, match="make it inside map_fun"):
        Checkpoint()


def test_modules_of_another_librarys_transformers_say_what_to_use() -> None:
    with pytest.raises(RemovedModuleError, match="KerasModel"):
        import_module("sparkdl.transformers.named_image")
