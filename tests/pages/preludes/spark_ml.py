"""Data and models of the page's pipelines and saved models."""

import numpy as np
import torch

df = df.coalesce(2)  # each worker that scores imports TensorFlow


def scores(keras, name="image"):
    image = keras.Input((64,), name=name)
    return image, keras.layers.Dense(10, activation="softmax", name="scores")(image)


def build_model():
    import keras
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Model(*scores(keras))
        model.compile("sgd", "sparse_categorical_crossentropy")
    return model


# block: Spark ML: training and scoring as stages of a pipeline
assert "val_loss" in fitted.stages[-1].history

# block: A module of PyTorch
assert {"loss", "accuracy"} == set(fitted.stages[-1].history)

# block: A LightningModule
assert len(model.history["val_loss"]) == 5
assert "rawPrediction" in model.transform(assembler.transform(test)).columns

# block: Your own train_fn
assert model.history["loss"]
rows = model.setOutputMapping({"scores": "scores"}).transform(df).collect()
assert {len(row.scores) for row in rows} == {10}


def export(args, ctx):
    import keras

    image, found = scores(keras)
    embedding = keras.layers.Dense(4, name="embedding")(image)
    keras.Model(image, {"scores": found, "embedding": embedding}).export("/models/digits")


sparkdl.run(spark, export, nodes=1)
df = df.selectExpr("image", "image as pixels", "label", "cast(label as float) as age")

# block: Scoring
assert scored.count() == 64
assert scored.first().embedding.size == 4


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(65, 10)

    def forward(self, image, age):
        return self.last(torch.cat([image, age[:, None]], dim=1))


net = Net()

# block: A model of PyTorch
assert {len(row.scores) for row in scored.collect()} == {10}
