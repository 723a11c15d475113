"""A cluster whose nodes compute with TensorFlow until the program ends.

Runs in: the driver of a page's program
"""


def compute(args, ctx):
    import tensorflow as tf

    matrix = tf.ones((64, 64))
    while True:
        matrix = tf.linalg.normalize(matrix @ matrix)[0]


cluster = sparkdl.launch(
    spark, compute, args, nodes=2, framework="tensorflow", feeding=sparkdl.Feeding(fed=False)
)
