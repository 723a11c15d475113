"""Horovod's API over sparkdl's own launcher and collectives: `import sparkdl.horovod.torch as hvd`.

Runs in: child, driver

See docs/horovod.md. https://horovod.readthedocs.io/en/v0.28.1/
"""
