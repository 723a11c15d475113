"""Models and data of the page's estimators, and what its search reaches."""

import lightning.pytorch as pl
import optuna
import torch

df = df.coalesce(2)
accuracy = 0.5


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def build_model():
    import keras
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        image = keras.Input((64,), name="image")
        scores = keras.layers.Dense(10, activation="softmax", name="scores")(image)
        model = keras.Model(image, scores)
        model.compile("sgd", "sparse_categorical_crossentropy")
    return model


# block: Spark ML: training as a stage of a pipeline
assert "val_loss" in fitted.stages[-1].history

# block: A PyTorch module
assert {"loss", "accuracy"} == set(fitted.stages[-1].history)

# block: A LightningModule
assert 5 in map(len, model.history.values())

# block: Your own train_fn
assert model.history["loss"]
rows = model.setOutputMapping({"scores": "scores"}).transform(df).collect()
assert {len(row.scores) for row in rows} == {10}

# block: Hyper-parameters
assert set(found.best_params) == {"rate"}
df = df.withColumn("features", df.image)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])

# block: Training as Spark jobs
assert fitted.transform(df).count() == 64
