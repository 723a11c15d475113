"""`TransformersEstimator` on Spark: fits, restarts, scores, is saved; and refusals."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.feature import StringIndexer
from pyspark.sql import DataFrame, SparkSession

from sparkdl import TorchModel, TransformersEstimator
from sparkdl.core.errors import ConfigError, FeedTypeError, FrameworkMissingError
from sparkdl.core.options import Startup
from sparkdl.ml.estimators import training
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.text_make import MakeText
from sparkdl.ml.estimators.torch_train import TorchTask, train
from tests.doubles import sessions
from tests.doubles.lazy import Lazy, needs
from tests.doubles.sessions import SparkSessions
from tests.ml.text_models import (
    LABELS,
    SEED,
    TEXTS,
    adam,
    bert_config,
    die_once,
    gpt2,
    saved,
    tokenizer,
)
from tests.ml.torch_fits import Alone

torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
pytestmark = [
    *(pytest.mark.torch, pytest.mark.usefixtures("spark_ml"), pytest.mark.timeout(400)),
    needs("transformers", "lightning"),
]
EPOCHS, LORA_EPOCHS = 4, 12  # until all rows are learnt


@pytest.fixture(scope="module")
def reviews(spark_sessions: SparkSessions) -> DataFrame:
    """Columns `review`, `mood` (text), `stars` (int), `price` (double), `tags`, `weight`."""
    spark: SparkSession = spark_sessions.get(sessions.ML)
    rows = [
        (text, mood, int(mood == "pos"), len(text) / 10, [text], 1.0)
        for text, mood in zip(TEXTS, LABELS, strict=True)
    ]
    schema = "review string, mood string, stars int, price double, tags array<string>, weight float"
    return spark.createDataFrame(rows, schema).repartition(2)


def fit_of(model: Any, **params: Any) -> Any:
    given = {"text_col": "review", "label_col": "mood", "optimizer": adam, "seed": SEED}
    return TransformersEstimator(model, **{**given, "epochs": EPOCHS, **params})


def losses_alone(lone: Any, lora: bool) -> list[float]:
    """Train on all rows in each step, in this process."""
    made = MakeText(
        model=bert_config(), tokenizer=tokenizer(), kind="classification", classes=2, lora=lora
    )
    fields: dict[str, Any] = {"batch_size": 8, "seed": SEED, "made": made}
    fields["epochs"] = LORA_EPOCHS if lora else EPOCHS
    task = TorchTask(
        columns=Columns({"x": "text"}, {"y": ""}),
        **{"name": "alone", "optimizer": adam, "loss": "CrossEntropyLoss", **fields},
    )
    labels = [int(label == "pos") for label in LABELS]
    found: list[float] = train(task, Alone(x=TEXTS, y=labels))["history"]["loss"]  # type: ignore[arg-type]
    return found


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=needs("peft"))])
def test_killed_fit_on_two_nodes_has_the_losses_of_one_process_and_is_saved(
    reviews: DataFrame, tmp_path: Path, lone_node: None, lora: bool
) -> None:
    """A step is over all rows, wherever they are: the losses differ if one is lost or repeated."""
    stage = fit_of(
        bert_config(),
        tokenizer=tokenizer(),
        lora=lora,
        epochs=LORA_EPOCHS if lora else EPOCHS,
        num_workers=2,
        batch_size=8,
        max_restarts=1,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        callbacks=partial(die_once, tmp_path / "died", 2),
        startup=Startup(preload=["lightning.pytorch", "transformers"]),
    )
    stage.save(str(tmp_path / "estimator"))
    loaded: Any = TransformersEstimator.load(str(tmp_path / "estimator"))
    model = loaded.fit(reviews)
    assert (tmp_path / "died").exists()
    first, *_, last = losses = model.history["loss"]
    assert losses == pytest.approx(losses_alone(lone_node, lora), rel=1e-3, abs=1e-4)
    assert first == pytest.approx(math.log(2), abs=0.05), "as by chance"
    assert last < first * (0.05 if lora else 0.75)
    model.save(str(tmp_path / "model"))
    again: Any = TorchModel.load(str(tmp_path / "model"))
    scored = again.transform(reviews)
    assert scored.dtypes[-2:] == [("probability", "vector"), ("prediction", "string")]
    module = again.getModel()
    assert module.model.config.id2label == {0: "neg", 1: "pos"}
    for row in scored.collect():
        assert row.prediction == row.mood
        with torch.no_grad():
            expected = module([row.review]).softmax(1)[0].numpy()
        assert row.probability.toArray() == pytest.approx(expected, abs=1e-5)


@pytest.mark.smoke
def test_language_model_continues_the_texts_of_a_table(reviews: DataFrame) -> None:
    model = fit_of(gpt2, label_col=None, epochs=30, num_workers=2, batch_size=3).fit(reviews)
    assert model.history["loss"][-1] < model.history["loss"][0] / 2
    (row,) = model.transform(reviews.selectExpr("'fine fine' as review").limit(1)).collect()
    assert row.prediction == "plot the end"


def bert(kind: str = "BertForSequenceClassification", **given: Any) -> Any:
    return getattr(transformers, kind)(bert_config(**given))


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"text_col": "rview"}, "no column 'rview'.*did you mean 'review'"),
        ({"text_col": "tags"}, "text_col='tags' is of type array<string>: must be a string"),
        ({"label_col": "tags"}, "label_col='tags' is of type array<string>: must be whole"),
        ({"label_col": ["mood", "stars"]}, "label_col=.*must be one column, or None"),
        ({"label_col": "price", "model": bert}, "double, and the model's head has 2 classes"),
        ({"label_col": "low"}, "label_col='low' holds -1: .* numbers from 0"),
        ({"label_col": "one"}, "holds 1 different texts: classes must be 2 to"),
        ({"label_col": "four", "model": bert}, "holds the class 4, and the model's head has"),
        ({"label_col": "odd", "model": partial(bert, num_labels=3)}, "rename the labels"),
        ({"model": partial(bert, "BertModel")}, "a …ForSequenceClassification, and model is a Be"),
        ({"label_col": None, "model": bert}, "None needs a …ForCausalLM, and model is a BertFor"),
        ({"label_col": None, "weight_col": "weight"}, "weight_col and metrics need label_col"),
        ({"features_col": "review"}, "cannot use features_col: set text_col"),
        ({"folder": "nowhere"}, "model='.*nowhere': must be a folder that"),
        ({"folder": "bare"}, "the folder '.*bare' has no tokenizer"),
        ({"tokenizer": "elsewhere"}, "the folder '.*elsewhere' has no tokenizer"),
    ],
)
@pytest.mark.smoke
def test_what_cannot_be_trained_is_refused_before_nodes_start(
    reviews: DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, params: Any, match: str
) -> None:
    monkeypatch.setattr(training, "launch", None)
    bert("BertModel").save_pretrained(tmp_path / "bare")
    given = dict(params)
    folder = given.pop("folder", None)
    model = given.pop("model", bert_config)()
    rows = reviews.selectExpr(
        "*", "stars - 1 as low", "'x' as one", "stars * 4 as four", "concat(mood, 's') as odd"
    )
    own = {} if folder else {"tokenizer": tokenizer()}
    with pytest.raises(ConfigError, match=match):
        fit_of(str(tmp_path / folder) if folder else model, **{**own, **given}).fit(rows)


def test_labels_choose_what_is_learnt(reviews: DataFrame, tmp_path: Path) -> None:
    def learnt(label: str | None, model: Any = None, rows: DataFrame = reviews) -> Any:
        stage = fit_of(model or bert_config(), label_col=label, tokenizer=tokenizer())
        made = stage._maker(rows)
        return made.kind, made.classes, made.names

    rows = reviews.selectExpr("review", "stars = 1 as good", "stars * 2 as two", "mood", "price")
    assert learnt("good", rows=rows) == ("classification", 2, ())
    assert learnt("two", rows=rows) == ("classification", 3, ())
    assert learnt("mood") == ("classification", 2, ("neg", "pos"))
    assert learnt("price") == ("regression", 1, ())
    assert learnt(None) == ("language", None, ())
    indexed = StringIndexer(inputCol="mood", outputCol="index").fit(reviews).transform(reviews)
    assert learnt("index", rows=indexed) == ("classification", 2, ())
    known = bert_config(id2label={0: "pos", 1: "so so", 2: "neg"})
    folder = saved(tmp_path, transformers.BertForSequenceClassification(known))
    assert learnt("mood", folder) == ("classification", 3, ("pos", "so so", "neg"))
    nulls = reviews.selectExpr("review", "if(stars = 1, mood, null) as mood")
    with pytest.raises(FeedTypeError, match="column 'mood' holds a null"):
        learnt("mood", rows=nulls)


def test_what_is_no_model_and_a_missing_package_are_refused(
    reviews: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in (7, torch.nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match=r"model is a .*; give a folder, or a config or"):
            fit_of(given)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FrameworkMissingError, match=r"lora= needs peft.* pip install peft"):
        fit_of(gpt2, lora=True).fit(reviews)
