"""The function of the notebook."""

train_fn = train
