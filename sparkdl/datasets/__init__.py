"""A feed as each framework wants it: `tf.data`, PyTorch, JAX, and TensorFlowOnSpark's DataFeed.

Runs in: child
"""
