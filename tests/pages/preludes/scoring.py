"""A saved model, its rows, and a module of PyTorch."""

import torch

df = df.coalesce(2)  # each worker that scores imports TensorFlow


def export(args, ctx):
    import keras

    image = keras.Input((64,), name="image")
    found = keras.layers.Dense(10, activation="softmax", name="scores")(image)
    embedding = keras.layers.Dense(4, name="embedding")(image)
    keras.Model(image, {"scores": found, "embedding": embedding}).export("/models/digits")


sparkdl.run(spark, export, nodes=1)
df = df.selectExpr("image", "image as pixels", "label", "cast(label as float) as age")

# block: Scoring: predictions for a DataFrame
assert scored.count() == 64
assert scored.first().embedding.size == 4


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(65, 10)

    def forward(self, image, age):
        return self.last(torch.cat([image, age[:, None]], dim=1))


net = Net()

# block: A PyTorch module
assert {len(row.scores) for row in scored.collect()} == {10}
