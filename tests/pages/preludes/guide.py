"""The DataFrames, files and functions of the overview."""

validation = df
df.write.parquet("/data/more")


def train(args, ctx):
    read = 0
    for _ in range(args["epochs"]):
        for feed in ("input", "validation"):
            read += sum(1 for _ in ctx.dataset(8, x="image", y="label", feed=feed))
    return read + sum(1 for _ in ctx.dataset(8, x="image", y="label"))


def train_own_data(args, ctx):
    return ctx.rank
